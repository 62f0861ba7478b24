"""The syntax of bash: a script's words as they are written, and its commands as a tree.

Nothing is refused: what is no command is passed over.
"""

from __future__ import annotations

import re
from typing import Any

from partopt.configurations.arithmetic import UNKNOWN

Node = tuple[Any, ...]  # a command: its kind, then its parts
TEXT, LITERAL_TEXT = "\3", "\4"  # before a text behind `<<`, with variables or without
CONTROL = re.compile("[\0-\5\r]")  # letters that mean something here, which scripts do not have

_REDIRECTION = r"<<<|<<-?|<&|<>|<|>>|>&|>\||>"
_OPERATOR = re.compile(rf"&&|\|\||;;&|;&|;;|\n|;|\|&|\||&>>?|&|\(|\)|[0-9]*(?:{_REDIRECTION})")
_REDIRECTS = re.compile(rf"&>>?|[0-9]*(?:{_REDIRECTION})")
_LITERAL = re.compile(rf"[^\s;&|()<>'\"`$\\{UNKNOWN}]+")
_PLACEHOLDER = re.compile(r"<[A-Z][^<>\n$\"']*[\w.)]>")  # `<PATH TO FILE>`, to be filled in
# what `=~` compares with: parentheses and bars are of it
_REGEX = re.compile(r"(?:\\.|'[^']*'|\"[^\"]*\"|\$\{[^}]*\}|\([^()]*(?:\([^()]*\)[^()]*)*\)|\S)+")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=")
_TRIES = 10  # of `((`, whose end is looked for
_PLAIN = re.compile(r"[^'\"\\`#(){}]+")
_SEPARATORS = ("\n", ";", "&", ";;", ";&", ";;&")
_ENDS = ("then", "do", "fi", "done", "esac", "elif", "else", "in", "}", "]]", ")")


def tokens(text: str) -> list[str]:
    """Words, as they are written, and operators; behind `<<` the text that it begins."""
    found, begun = list[str](), list[int]()  # the places of `<<` whose texts are to come
    word, i, tries = "", 0, 0
    while i < len(text):
        c, end = text[i], i + 1
        operator = None if c.isdigit() and word else _OPERATOR.match(text, i)
        if text.startswith("\\\n", i):
            end = i + 2
        elif c in " \t" or (c == "#" and not word):
            found += [word] * bool(word)
            word = ""
            if c == "#":
                end = text.find("\n", i) % (len(text) + 1)
            elif found and found[-1] == "=~" and (regex := _REGEX.match(text, end)):
                found.append(regex[0])
                end = regex.end()
        elif placeholder := _PLACEHOLDER.match(text, i):
            word, end = f"{word}'{placeholder[0]}'", placeholder.end()
        elif text.startswith(("<(", ">("), i):  # a file that a command writes or reads
            end = closing(text, i + 1, "(", ")")
            word += f"${text[i + 1 : end]}"
        elif c == "(" and ASSIGNED.fullmatch(word):  # of an array
            end = closing(text, i, "(", ")")
            word += text[i:end]
        elif text.startswith("((", i) and not word and tries < _TRIES:
            end = closing(text, i)
            if text[end - 2 : end] == "))":
                found.append(text[i:end])
            else:  # commands apart within commands apart
                tries, end = tries + 1, i + 1
                found.append(c)
        elif operator:
            found += [word] * bool(word)
            word, end = "", operator.end()
            found.append(operator[0])
            if operator[0] in ("<<", "<<-"):
                begun.append(len(found))
            elif c == "\n":
                for place in begun:
                    end = _take_text(text, end, found, place)
                begun = []
        elif c in "'\"`$\\" or c in UNKNOWN:
            end = quoted_end(text, i)
            word += text[i:end]
        else:
            literal = _LITERAL.match(text, i)
            end = literal.end() if literal else end
            word += text[i:end]
        i = end
    return [*found, *[word] * bool(word)]


def _take_text(text: str, start: int, found: list[str], place: int) -> int:
    """Put the text behind `<<` in the place of the word that ends it; gives where it ends."""
    if place >= len(found):
        return start
    raw = found[place]
    last, lines = re.sub(r"['\"\\]", "", raw), list[str]()
    while start < len(text):
        stop = text.find("\n", start) % (len(text) + 1)
        line = text[start:stop]
        start = stop + 1
        if line.strip() == last:
            break
        lines.append(line.lstrip("\t") if found[place - 1] == "<<-" else line)
    found[place] = (TEXT if raw == last else LITERAL_TEXT) + "\n".join(lines)
    return start


def quoted_end(text: str, i: int) -> int:
    """Where a quotation, an expansion, an escape or a mark ends that begins at i."""
    c = text[i]
    if c == "\\":
        return i + 2
    if c in UNKNOWN:
        return text.find(c, i + 1) % (len(text) + 1) + 1
    if c == "$":
        for begin, end in (("(", ")"), ("{", "}")):
            if text.startswith(begin, i + 1):
                return closing(text, i + 1, begin, end)
        return quoted_end(text, i + 1) if text.startswith("'", i + 1) else i + 1
    j, escapes = i + 1, c != "'" or text[i - 1 : i] == "$"
    while j < len(text) and text[j] != c:
        inside = "\\" if c != '"' else "\\$`"
        j = quoted_end(text, j) if escapes and text[j] in inside else j + 1
    return j + 1


def closing(text: str, i: int, begin: str = "(", end: str = ")") -> int:
    """The place behind the `end` that goes with the `begin` at i; the text's where there is none.

    Comments have no quotations.
    """
    depth, j = 0, i
    while j < len(text):
        if plain := _PLAIN.match(text, j):
            j = plain.end()
            continue
        c = text[j]
        if c in "'\"\\`":
            j = quoted_end(text, j)
            continue
        if c == "#" and text[j - 1] in " \t\n" and begin == "(":
            j = text.find("\n", j) % (len(text) + 1)
            continue
        depth += (c == begin) - (c == end)
        j += 1
        if not depth:
            break
    return min(j, len(text))


def is_operator(token: str) -> bool:
    """Whether a token is no word."""
    return _OPERATOR.fullmatch(token) is not None


def parse(text: str) -> list[Node]:
    """The commands of a script."""
    return _Parser(tokens(text)).body()


class _Parser:
    def __init__(self, found: list[str]) -> None:
        self.tokens, self.at = found, 0

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *wanted: str) -> str:
        """The next token, if it is a wanted one, or any where none is named; else nothing."""
        token = self.peek()
        if token is None or (wanted and token not in wanted):
            return ""
        self.at += 1
        return token

    def skip(self, *passed: str) -> None:
        while self.take(*passed):
            pass

    def body(self, *ends: str) -> list[Node]:
        """Commands up to one of the words that end them, which stays."""
        found = list[Node]()
        while (token := self.peek()) is not None and token not in ends:
            before = self.at
            if not self.take(*_SEPARATORS):
                found.append(self.chain())
            self.at += self.at == before  # a word that ends nothing
        return found

    def chain(self) -> Node:
        left = self.pipeline()
        while how := self.take("&&", "||"):
            self.skip("\n")
            left = (how, left, self.pipeline())
        return left

    def pipeline(self) -> Node:
        negated = False
        while self.take("!"):
            negated = not negated
        parts = [self.command()]
        while self.take("|", "|&"):
            self.skip("\n")
            parts.append(self.command())
        node = parts[0] if len(parts) == 1 else ("|", parts)
        return ("!", node) if negated else node

    def command(self) -> Node:
        """One command, with where its input and output go."""
        token = self.peek() or ""
        if token in _ENDS or token in _SEPARATORS:
            return ("list", [])
        node: Node
        match token:
            case "if":
                node = self.branches()
            case "while" | "until":
                self.at += 1
                condition = self.body("do")
                node = (token, condition, self.loop_body())
            case "for" | "select":
                node = self.loop()
            case "case":
                node = self.cases()
            case "{" | "(":
                self.at += 1
                kind, end = ("list", "}") if token == "{" else ("apart", ")")
                node = (kind, self.body(end))
                self.take("}", ")")
            case "[[":
                stop = self.at
                while stop < len(self.tokens) and self.tokens[stop] != "]]":
                    stop += 1
                node = ("[[", self.tokens[self.at + 1 : stop])
                self.at = stop + 1
            case "function":
                self.at += 1
                name = self.take()
                self.skip("(", ")", "\n")
                node = ("function", name, self.command())
            case _ if token.startswith("(("):
                node = ("((", self.take()[2:-2])
            case _:
                return self.simple()
        self.simple()  # where its output goes
        return node

    def simple(self) -> Node:
        """The words of a command, the texts that it is given, and the files that it writes."""
        words, texts, files = list[str](), list[str](), list[str]()
        while (token := self.peek()) is not None:
            if _REDIRECTS.fullmatch(token):
                self.at += 1
                target = self.take()
                if token.startswith("<<"):
                    texts.append(target)
                elif ">" in token and not token.endswith("&"):
                    files.append(target)
            elif is_operator(token):
                if token == "(" and len(words) == 1 and self.tokens[self.at + 1 :][:1] == [")"]:
                    self.at += 2
                    self.skip("\n")
                    return ("function", words[0], self.command())
                break
            else:
                words.append(token)
                self.at += 1
        return ("simple", words, texts, files)

    def branches(self) -> Node:
        pairs = list[tuple[list[Node], list[Node]]]()
        while self.take("if", "elif"):
            condition = self.body("then")
            self.take("then")
            pairs.append((condition, self.body("elif", "else", "fi")))
        otherwise = self.body("fi") if self.take("else") else []
        self.take("fi")
        return ("if", pairs, otherwise)

    def loop_body(self) -> list[Node]:
        self.skip("\n", ";")
        self.take("do", "{")
        found = self.body("done", "}")
        self.take("done", "}")
        return found

    def loop(self) -> Node:
        self.at += 1
        name = self.take()
        if name.startswith("(("):
            return ("for((", *[*name[2:-2].split(";"), "", ""][:3], self.loop_body())
        self.skip("\n")
        words: list[str] = ['"$@"']
        if self.take("in"):
            words = []
            while (token := self.peek()) is not None and token not in _SEPARATORS:
                words.append(self.take())
        return ("for", name, words, self.loop_body())

    def cases(self) -> Node:
        self.at += 1
        word, found = self.take(), list[tuple[list[str], list[Node]]]()
        self.skip("\n")
        self.take("in")
        self.skip("\n", ";")
        while (token := self.peek()) is not None and token != "esac":
            patterns = list[str]()
            while (token := self.take()) not in ("", ")"):
                patterns += [token] * (not is_operator(token))
            found.append((patterns, self.body(";;", ";&", ";;&", "esac")))
            self.skip("\n", ";", ";;", ";&", ";;&")
        self.take("esac")
        return ("case", word, found)
