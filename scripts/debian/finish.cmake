# SPDX-License-Identifier: Apache-2.0
# CPack runs this on the installed files before it packs them: copyright, changelogs, compressed manual pages.
set(root ${CPACK_TEMPORARY_DIRECTORY}/usr/share)
set(doc ${root}/doc/${CPACK_PACKAGE_NAME})
set(sources ${CMAKE_CURRENT_LIST_DIR}/../..)

file(READ ${CMAKE_CURRENT_LIST_DIR}/copyright copyright)
file(WRITE ${doc}/copyright "${copyright}")
file(REMOVE ${doc}/LICENSE)  # Debian has the text of this license in one place

string(TIMESTAMP when "%a, %d %b %Y %H:%M:%S +0000" UTC)  # SOURCE_DATE_EPOCH, where that is set
file(WRITE ${doc}/changelog.Debian "${CPACK_PACKAGE_NAME} (${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}) unstable; urgency=medium

  * Version ${CPACK_PACKAGE_VERSION}, as changelog.gz tells.

 -- ${CPACK_DEBIAN_PACKAGE_MAINTAINER}  ${when}
")
configure_file(${sources}/docs/changelog.md ${doc}/changelog COPYONLY)
file(GLOB_RECURSE pages ${root}/man/*.1)
execute_process(COMMAND gzip -9nf ${pages} ${doc}/changelog ${doc}/changelog.Debian COMMAND_ERROR_IS_FATAL ANY)
