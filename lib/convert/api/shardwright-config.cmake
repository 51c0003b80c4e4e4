# SPDX-License-Identifier: Apache-2.0
# What find_package(shardwright) reads: the target shardwright::shardwright.
include(CMakeFindDependencyMacro)
find_dependency(tl-expected)
include(${CMAKE_CURRENT_LIST_DIR}/shardwright-targets.cmake)
