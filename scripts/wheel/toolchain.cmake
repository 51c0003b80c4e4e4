# SPDX-License-Identifier: Apache-2.0
# For CMake: the gcc of this machine with the headers and libraries in the folder of this file, after scripts/package
# has copied it to them.
set(parts ${CMAKE_CURRENT_LIST_DIR})
set(CMAKE_C_COMPILER gcc)
set(CMAKE_CXX_COMPILER g++)
set(CMAKE_SYSROOT ${parts}/sysroot)
set(CMAKE_FIND_ROOT_PATH ${parts}/prefix)
set(CMAKE_PREFIX_PATH ${parts}/prefix)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${parts}/prefix/lib/pkgconfig)
set(flags "-B${parts}/sysroot/usr/lib -isystem ${parts}/sysroot/c++ -ffile-prefix-map=${parts}=.")
# Leaves out functions that a command does not call: many in the objects of unity builds, which have a dozen files each.
set(flags "${flags} -ffunction-sections -fdata-sections")
set(CMAKE_C_FLAGS_INIT "${flags} -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.")
set(CMAKE_CXX_FLAGS_INIT "${flags} -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.")
set(OPENSSL_USE_STATIC_LIBS ON)
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static-libstdc++ -static-libgcc -Wl,--gc-sections")
# Those that others load share the unwinder with them.
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-static-libstdc++ -Wl,--gc-sections")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-static-libstdc++ -Wl,--gc-sections")
