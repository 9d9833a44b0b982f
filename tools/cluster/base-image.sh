#!/bin/bash
# Minimal Debian root folder: glibc, dash, coreutils, python3.11 with its standard library.   usage: base-image.sh OUTDIR
# --variant=extract unpacks packages without running their scripts: no chroot, fast, enough for an image. Needs root.
set -euo pipefail
out=$1
rm -rf "$out"; mkdir -p "$out"
SOURCE_DATE_EPOCH=1700000000 mmdebstrap --quiet --variant=extract --mode=root --format=directory \
  --include=python3-minimal,libpython3.11-stdlib,libc-bin,libstdc++6,dash,coreutils \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/zoneinfo/*' \
  bookworm "$out"
rm -rf "$out"/var/lib/apt "$out"/var/lib/dpkg "$out"/var/cache "$out"/dev "$out"/etc/apt "$out"/usr/share/bash-completion
mkdir -p "$out"/{dev,proc,sys,run,root,tmp,etc}; chmod 1777 "$out"/tmp
[ -e "$out"/bin/sh ] || ln -s dash "$out"/bin/sh
[ -e "$out"/usr/bin/python3 ] || ln -s python3.11 "$out"/usr/bin/python3
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' > "$out"/etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' > "$out"/etc/group
echo 'hosts: files dns' > "$out"/etc/nsswitch.conf
: > "$out"/etc/resolv.conf; echo localhost > "$out"/etc/hostname
