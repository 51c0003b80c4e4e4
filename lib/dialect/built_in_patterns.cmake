# cmake -DOUT=FILE.cc -DFOLDER=patterns -P built_in_patterns.cmake: puts pattern files into a source file.
file(GLOB files "${FOLDER}/*.json")
list(SORT files)
set(entries "")
foreach(file ${files})
  get_filename_component(name "${file}" NAME)
  file(READ "${file}" text)
  string(APPEND entries "    {\"patterns/${name}\", R\"json(${text})json\"},\n")
endforeach()
file(WRITE "${OUT}" "#include \"dialect/rules/patterns_internal.h\"

namespace shardwright::dialect {
namespace {

constexpr BuiltInPatternFile kFiles[] = {
${entries}};

}  // namespace

std::span<const BuiltInPatternFile> BuiltInPatternFiles() { return kFiles; }

}  // namespace shardwright::dialect
")
