#!/bin/bash
# What no test can count on: 32-bit and musl programs under /etc/ld.so.preload, and the aarch64 library under emulation.
# Root. Debian packages: musl libc6-i386 qemu-user libc6-arm64-cross. Needs make native and make release (whose zig
# compiles the programs). Prints a line for each check; exits with 1 if one failed.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
NATIVE=${HAMI_NATIVE_BUILD:-$ROOT/build/native}
RELEASE=${HAMI_RELEASE_BUILD:-$ROOT/build/release}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/hami
ZIG=${HAMI_ZIG:-$(echo "$CACHE"/release-venv/lib/python*/site-packages/ziglang/zig)}
export ZIG_GLOBAL_CACHE_DIR=$CACHE/release/zig-programs ZIG_LOCAL_CACHE_DIR=$CACHE/release/zig-programs
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
FAILED=0

check() { # NAME EXPECTED ACTUAL
    if [[ $3 == $2 ]]; then echo "ok    $1"; else echo "FAIL  $1: $3"; FAILED=1; fi
}

cat > "$WORK/program.c" <<'C'
#include <stdio.h>
int main(void) {
    printf("%d bits\n", (int)sizeof(void *) * 8);
    return 7;
}
C
mkdir "$WORK/etc"
cp -a /etc/. "$WORK/etc"
echo "$NATIVE/libvgpu.so" > "$WORK/etc/ld.so.preload"
preloaded() {
    unshare --mount sh -c 'mount --bind "$1" /etc; shift; exec "$@"' sh "$WORK/etc" "$@" 2>&1 && echo "= 0" || echo "= $?"
}

check "a shell" "= 0" "$(preloaded /bin/sh -c :)"
"$ZIG" cc -target x86_64-linux-musl -dynamic -o "$WORK/musl" "$WORK/program.c"
check "a musl program runs and prints its own line alone" "64 bits
= 7" "$(preloaded "$WORK/musl")"
"$ZIG" cc -target x86-linux-gnu.2.17 -o "$WORK/small" "$WORK/program.c"
check "a 32-bit program runs; ld.so says that it ignores the library" \
    "ERROR: ld.so: object * from /etc/ld.so.preload cannot be preloaded (wrong ELF class: ELFCLASS64): ignored.
32 bits
= 7" "$(preloaded "$WORK/small")"

# aarch64: the release library preloaded into programs under emulation, with the simulated driver built for it.
cat > "$WORK/arm-cc" <<C
#!/bin/sh
exec "$ZIG" cc -target aarch64-linux-gnu.2.34 "\$@"
C
chmod +x "$WORK/arm-cc"
"$ROOT/.venv/bin/cmake" -S "$ROOT/native" -B "$WORK/arm" -G Ninja -DCMAKE_MAKE_PROGRAM="$ROOT/.venv/bin/ninja" \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER="$WORK/arm-cc" \
    -DCMAKE_ASM_COMPILER="$WORK/arm-cc" -DCMAKE_C_COMPILER_WORKS=ON -DCMAKE_HAVE_LIBC_PTHREAD=ON \
    -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DCMAKE_C_FLAGS=-Wno-error --log-level=WARNING > /dev/null
"$ROOT/.venv/bin/cmake" --build "$WORK/arm" --target vgpu_shell fakegpu_nvml vgpu_unit -- --quiet > "$WORK/arm.log" 2>&1 ||
    { tail -5 "$WORK/arm.log"; exit 1; }
mkdir "$WORK/state" "$WORK/region"
arm() { # environment settings and the program follow
    env -u LD_PRELOAD qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$WORK/arm/fakegpu" \
        -E FAKEGPU_STATE="$WORK/state" -E FAKEGPU_CONTEXT_MIB=0 -E FAKEGPU_MEMORY_MIB=16384 \
        -E CUDA_DEVICE_MEMORY_SHARED_CACHE="$WORK/region/vgpu.cache" -E CUDA_DEVICE_MEMORY_LIMIT_0=64m \
        -E LIBCUDA_LOG_LEVEL=0 "$@" 2>&1
}
for reach in link dlsym proc1 proc2; do
    rm -rf "$WORK/region/vgpu.cache"
    answers=$(printf '%s\n' init 'retain 0' 'alloc 67108864' 'alloc 1' 'fork 1' |
        arm -E LD_PRELOAD="$RELEASE/aarch64/libvgpu.so" "$WORK/arm/vgpu-test/vgpu_shell" $reach | cut -d ' ' -f 1 | tr '\n' ' ')
    check "aarch64, driver reached by $reach: refused at the limit, a child has no driver" "0 0 0 2 3 " "$answers"
done
for name in $(arm "$WORK/arm/vgpu-test/vgpu_unit"); do
    [[ $name == without_ofd_locks ]] && continue # needs a filter of system calls, which emulation does not obey
    check "aarch64 unit: $name" "= 0" "$(arm "$WORK/arm/vgpu-test/vgpu_unit" "$name" "$WORK/region/unit.cache" && echo "= 0" || echo "= $?")"
    rm -f "$WORK/region/unit.cache"
done
exit $FAILED
