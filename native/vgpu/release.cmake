# What a wheel installs: the files of `make release` if they were made of these sources (tools/release.py computes the
# same hash), else what was compiled here, for this machine's glibc and newer.
set(HAMI_RELEASE_FOLDER "${CMAKE_SOURCE_DIR}/../build/release" CACHE STRING
    "Where `make release` leaves its files; empty: this is that build")
set(release "${HAMI_RELEASE_FOLDER}/${CMAKE_SYSTEM_PROCESSOR}")

file(GLOB names RELATIVE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/CMakeLists.txt ${CMAKE_SOURCE_DIR}/vgpu/CMakeLists.txt
     ${CMAKE_SOURCE_DIR}/vgpu/src/* ${CMAKE_SOURCE_DIR}/vgpu/generated/* ${CMAKE_SOURCE_DIR}/vgpu/tools/*)
list(SORT names)
set(text "")
foreach(name IN LISTS names)
  file(SHA256 ${CMAKE_SOURCE_DIR}/${name} hash)
  string(APPEND text "${hash} ${name}\n")
endforeach()
string(SHA256 ours "${text}")
set(theirs "none")
if(EXISTS ${release}/sources.sha256 AND EXISTS ${release}/libvgpu.so AND EXISTS ${release}/vgpu-region)
  file(READ ${release}/sources.sha256 theirs)
endif()

if(ours STREQUAL theirs)
  message(STATUS "taking ${release}/libvgpu.so")
  install(PROGRAMS ${release}/libvgpu.so ${release}/vgpu-region DESTINATION hami/lib COMPONENT vgpu)
elseif(HAMI_RELEASE_FOLDER)
  message(WARNING "No release build of these sources in ${release} (make release): "
                  "libvgpu.so works with the glibc of this machine and newer only")
  install(TARGETS vgpu LIBRARY DESTINATION hami/lib COMPONENT vgpu)
  install(TARGETS vgpu_region RUNTIME DESTINATION hami/lib COMPONENT vgpu)
endif()
