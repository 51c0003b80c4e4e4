# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs for pages that are written for the repository: links out of docs/, links to folders, pages of the top level.

SHARDWRIGHT_REPOSITORY is the address of the repository, such as https://github.com/OWNER/NAME. Links to source files lead
there. Without it their text stays, as code.
"""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP_PAGES = ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md")  # pages outside docs/ that the site has too
FOLDERS = ("formats/", "decisions/")  # folders of docs/ with an index page
INDEX = "index.md"
STYLE = ".md-typeset table:not([class]) :is(td, th) code { word-break: normal; }\n.md-grid { max-width: 76rem; }\n"

CODE_OR_LINK = re.compile(r"^([ \t]*)(```+|~~~+).*?^[ \t]*\2[ \t]*$|(?P<ticks>`+)(?!`)(?:(?!\n\n).)*?(?<!`)(?P=ticks)(?!`)"
                          r"|(?P<mark>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^()\s]+)\)", re.S | re.M)
LIST_ITEM = re.compile(r"[ \t]*(?:[*+-]|(\d+)[.)])[ \t]+\S")
FENCE = re.compile(r"[ \t]*(```+|~~~+)")


def title_of(path):
    """The first heading of a Markdown file."""
    match = re.search(r"^# +(.+)$", path.read_text(encoding="utf-8"), re.M)
    return match.group(1).replace("`", "") if match else path.stem


def pages_in(folder):
    """Pages of a folder of docs/ in the order of their names, without its index."""
    return [path for path in sorted((ROOT / "docs" / folder).glob("*.md")) if path.name not in (INDEX, "README.md")]


def expanded(nav):
    """The navigation with the pages of each folder in place of its name."""
    found = []
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            found.append({title: expanded(value)})
        elif value.endswith("/"):
            pages = [{title_of(path): value + path.name} for path in pages_in(value)]
            found.append({title: [value + index_of(value), *pages]})
        else:
            found.append(entry)
    return found


def index_of(folder):
    """The page that a link to a folder of docs/ leads to: its own, or one that on_files makes."""
    return "README.md" if (ROOT / "docs" / folder / "README.md").is_file() else INDEX


def page_list(folder, but=""):
    """Links to the pages of a folder as a list, without those to which the text `but` has a link."""
    return "".join(f"* [{title_of(path)}]({path.name})\n" for path in pages_in(folder) if f"]({path.name}" not in but)


def index_page(folder):
    return f"# {folder.strip('/').capitalize()}\n\n{page_list(folder)}"


def repository_link(path, anchor, repository):
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path}{anchor}"


def rewritten(target, page, repository):
    """Returns the target of a link on the site, or "" if the site has no such page and the repository is not known.

    \\param page  path below docs/, or the name of a page of the top level
    """
    path, _, anchor = target.partition("#")
    anchor = anchor and f"#{anchor}"
    if not path or re.match(r"[a-z]+:|/", path):
        return target
    home = "" if page in TOP_PAGES else os.path.join("docs", os.path.dirname(page))
    place = os.path.normpath(os.path.join(home, path))
    if not (ROOT / place).exists():
        return target  # MkDocs reports it
    if place in TOP_PAGES:
        inside = place
    elif place.startswith("docs/"):
        inside = place.removeprefix("docs/")
        if (ROOT / place).is_dir():
            inside += "/" + index_of(inside)
    elif place == "docs":
        inside = "README.md"
    else:
        return repository_link(place, anchor, repository) if repository else ""
    here = "" if page in TOP_PAGES else os.path.dirname(page)
    return os.path.relpath(inside, here or ".") + anchor


def with_links(markdown, page, repository):
    """A page with the links that the site has."""

    def link(match):
        if match["target"] is None:  # GitHub needs the backslashes in tables, MkDocs would show them.
            return match.group() if match[2] else match.group().replace("\\|", "|")
        target = rewritten(match["target"], page, repository)
        return f"{match['mark']}[{match['text']}]({target})" if target else match["text"]

    return CODE_OR_LINK.sub(link, markdown)


def with_gaps(markdown):
    """Adds the empty line between a paragraph and a list or table that GitHub does not need and MkDocs does."""
    lines, fence, first = [], None, ""  # first: the line that the present block begins with
    for line in markdown.split("\n"):
        if match := FENCE.match(line):
            if fence is None:
                fence = match[1]
            elif match[1].startswith(fence):
                fence = None
        elif fence is None:
            first = (first or line) if line.strip() else ""
            item = LIST_ITEM.match(line)
            is_list = item and not LIST_ITEM.match(first) and (item[1] in (None, "1") or first.startswith(" "))
            is_table = line.startswith("|") and not first.startswith("|") and not LIST_ITEM.match(first)
            if is_list or is_table:
                lines.append("")
                first = line
        lines.append(line)
    return "\n".join(lines)


def on_config(config):
    config.nav = expanded(config.nav)
    repository = os.environ.get("SHARDWRIGHT_REPOSITORY", "")
    if repository:
        config.repo_url = repository
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files, config):
    from mkdocs.structure.files import File  # pylint: disable=import-outside-toplevel

    for name in TOP_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for folder in FOLDERS:
        if index_of(folder) == INDEX:
            files.append(File.generated(config, folder + INDEX, content=index_page(folder)))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    return files


def on_page_markdown(markdown, page, **_):
    path = page.file.src_uri
    folder = os.path.dirname(path) + "/"
    if folder in FOLDERS and os.path.basename(path) == "README.md":
        markdown += "\n" + page_list(folder, but=markdown)
    return with_links(with_gaps(markdown), path, os.environ.get("SHARDWRIGHT_REPOSITORY", ""))
