"""Hooks of MkDocs for pages that are written for the repository: links out of docs/, links to folders, pages of the top level.

SHARDWRIGHT_REPOSITORY is the address of the repository, such as https://github.com/OWNER/NAME. Links to source files lead
there. Without it their text stays, as code.
"""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP_PAGES = ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md")  # pages outside docs/ that the site has too
INDEX = "index.md"
STYLE = ".md-typeset table:not([class]) td code { word-break: normal; }\n.md-grid { max-width: 76rem; }\n"

CODE_OR_LINK = re.compile(r"^([ \t]*)(```+|~~~+).*?^[ \t]*\2[ \t]*$|``[^`]*``|`[^`]*`"
                          r"|(?P<mark>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^()\s]+)\)", re.S | re.M)


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


def index_page(folder):
    lines = [f"* [{title_of(path)}]({path.name})" for path in pages_in(folder)]
    return "\n".join([f"# {folder.strip('/').capitalize()}", "", *lines, ""])


def repository_link(path, anchor, repository):
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path}{anchor}"


def rewritten(target, page, repository):
    """Where a link of a page leads on the site; "" where the site has nothing and the repository is not known.

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
        if match["target"] is None:
            return match.group()
        target = rewritten(match["target"], page, repository)
        return f"{match['mark']}[{match['text']}]({target})" if target else match["text"]

    return CODE_OR_LINK.sub(link, markdown)


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
    for folder in ("formats/", "decisions/"):
        if index_of(folder) == INDEX:
            files.append(File.generated(config, folder + INDEX, content=index_page(folder)))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    return files


def on_page_markdown(markdown, page, **_):
    return with_links(markdown, page.file.src_uri, os.environ.get("SHARDWRIGHT_REPOSITORY", ""))
