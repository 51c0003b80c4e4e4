# SPDX-License-Identifier: Apache-2.0
# What scripts/package asks CPack for: one Debian package of the component "commands". shlibdeps finds the
# libraries that it depends on.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ${PROJECT_NAME})
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_SOURCE_DIR}/build/package)
set(CPACK_INSTALL_CMAKE_PROJECTS "${PROJECT_BINARY_DIR};${PROJECT_NAME};commands;/")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_SET_DESTDIR OFF)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
                                                WORLD_READ WORLD_EXECUTE)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/finish.cmake)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "openmpi-bin | mpich, python3")
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "$ENV{SHARDWRIGHT_MAINTAINER}")
if(NOT CPACK_DEBIAN_PACKAGE_MAINTAINER)
  set(CPACK_DEBIAN_PACKAGE_MAINTAINER "The Shardwright authors")  # scripts/package brings an address too
endif()
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "converter of sharded training checkpoints
Turns a checkpoint of a training job into one for other numbers of ranks,
another trainer or number format, with the optimizer: for DeepSpeed,
torch.distributed.checkpoint, Megatron-Core and others. Saves and restores a
few experts of mixture-of-experts models at a time, and plans where replicas
of experts live.")
include(CPack)
