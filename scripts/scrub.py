"""What programs print, without what is private: for reports that are published."""
import functools
import getpass
import os
import re
import socket

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@functools.lru_cache(maxsize=None)
def private_words():
    """[(pattern, replacement)] for what programs print: paths outside the tree, names."""
    words = [(re.escape(root) + r"(?=/|\b)", ".") for root in {ROOT, os.path.realpath(ROOT)}]
    # An absolute path, but neither the end of a relative one, a rate such as GB/s, nor an address of the web.
    rest = r"[^\s'\"`,;:()|]"
    starts = [rf"(?<![\w.~*+>/-])/(?!/){rest}+", rf"(?<=-[IL])/{rest}+",
              *(re.escape(home) + rest + "*" for home in homes())]
    words += [("|".join(starts), lambda path: hidden_path(path[0])),
              (r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}", "[uuid]")]
    for name, instead in (socket.gethostname(), "[host]"), (user_name(), "[user]"):
        if len(name) > 1 and name not in ("root", "localhost"):
            words.append((r"(?<![\w-])" + re.escape(name) + r"(?![\w-])", instead))
    return [(re.compile(pattern), instead) for pattern, instead in words]


def hidden_path(path):
    """Of a path outside the tree a file's name is enough; what has no suffix may be a directory of the user's name."""
    name = os.path.basename(path)
    return f"[path]/{name}" if "." in name.strip(".") else "[path]"


def homes():
    home = os.path.expanduser("~")
    return [home] if len(home) > 3 else []


def user_name():
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def scrub(text):
    for pattern, instead in private_words():
        text = pattern.sub(instead, text)
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
