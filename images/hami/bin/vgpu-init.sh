#!/bin/sh
# Puts libvgpu.so and ld.so.preload below DESTINATION, a folder named .../vgpu.   usage: vgpu-init.sh DESTINATION
[ -n "$1" ] || { echo "usage: vgpu-init.sh DESTINATION" >&2; exit 1; }
destination=${1%/}
case $destination in
*/vgpu) HOOK_PATH=${destination%/vgpu} exec hami install-library ;;
*) echo "vgpu-init.sh: $1 must end in /vgpu" >&2; exit 1 ;;
esac
