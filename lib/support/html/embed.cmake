# SPDX-License-Identifier: Apache-2.0
# cmake -DOUT=FILE.cc -DFOLDER=DIR -DMODULE=placement -DPARTS=css,html -P embed.cmake: puts DIR/page.css, DIR/page.html, ...
# into a source file, as kPageCss, kPageHtml, ... of namespace shardwright::MODULE.
string(REPLACE "," ";" parts "${PARTS}")
set(text "")
set(names "")
foreach(part ${parts})
  file(READ "${FOLDER}/page.${part}" content)
  string(SUBSTRING "${part}" 0 1 first)
  string(TOUPPER "${first}" first)
  string(SUBSTRING "${part}" 1 -1 rest)
  string(APPEND names "extern const char* const kPage${first}${rest};\n")
  string(APPEND text "const char* const kPage${first}${rest} = R\"page(${content})page\";\n")
endforeach()
file(WRITE "${OUT}" "namespace shardwright::${MODULE} {\n\n${names}\n${text}\n}  // namespace shardwright::${MODULE}\n")
