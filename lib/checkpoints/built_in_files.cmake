# SPDX-License-Identifier: Apache-2.0
# cmake -DOUT=FILE.cc -DFOLDER=patterns -DORIGIN=patterns -DHEADER=X_internal.h -DNAME=BuiltInXFile -P built_in_files.cmake:
# puts the *.json of a folder into a source file that defines NAMEs().
file(GLOB files "${FOLDER}/*.json")
list(SORT files)
set(entries "")
foreach(file ${files})
  get_filename_component(name "${file}" NAME)
  file(READ "${file}" text)
  string(APPEND entries "    {\"${ORIGIN}/${name}\", R\"json(${text})json\"},\n")
endforeach()
file(WRITE "${OUT}" "#include \"${HEADER}\"

namespace shardwright::checkpoints {

std::span<const ${NAME}> ${NAME}s() {
  static constexpr ${NAME} kFiles[] = {
${entries}};
  return kFiles;
}

}  // namespace shardwright::checkpoints
")
