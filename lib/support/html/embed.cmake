# SPDX-License-Identifier: Apache-2.0
# cmake -DOUT=FILE.cc -DFOLDER=DIR -DMODULE=placement -DPARTS=css,html -P embed.cmake: puts DIR/page.css, DIR/page.html, ...
# into a source file, as kPageCss, kPageHtml, ... of namespace shardwright::MODULE. The part costs.js is DIR/page.costs.js and
# becomes kPageCostsJs.
string(REPLACE "," ";" parts "${PARTS}")
set(text "")
set(names "")
foreach(part ${parts})
  file(READ "${FOLDER}/page.${part}" content)
  set(name "")
  string(REPLACE "." ";" words "${part}")
  foreach(word ${words})
    string(SUBSTRING "${word}" 0 1 first)
    string(TOUPPER "${first}" first)
    string(SUBSTRING "${word}" 1 -1 rest)
    string(APPEND name "${first}${rest}")
  endforeach()
  string(APPEND names "extern const char* const kPage${name};\n")
  string(APPEND text "const char* const kPage${name} = R\"page(${content})page\";\n")
endforeach()
file(WRITE "${OUT}" "namespace shardwright::${MODULE} {\n\n${names}\n${text}\n}  // namespace shardwright::${MODULE}\n")
