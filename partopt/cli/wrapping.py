"""Messages in lines of the terminal, with paths and quotations whole and commands to be copied."""

from __future__ import annotations

import re
import textwrap

from partopt.report.text import command_lines

_LEAD = re.compile(r"(?:error|hint|warning|note|next): +")
_COMMAND = re.compile(r"(?:^|(?<=: ))(?:partopt|torchrun) .*$")
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # of a command
# what stays on one line: the file that a message begins with, a short quotation, an option's value
_WHOLE = re.compile(r'^[^:]*/[^:]*(?=: )|"[^"]{,40}"|--[a-z][a-z-]* [^\s-]\S*')
_JOINT = "\0"  # in place of a blank at which no line ends; messages have no control characters


def wrap(message: str, wide: int) -> str:
    """A line of standard error in lines of `wide` columns, those after the first indented.

    A command that is longer goes on after a backslash. What has none of the leads of messages, as
    the line of a traceback, stays as it is.
    """
    lead = _LEAD.match(message)
    if lead is None or len(message) <= wide:
        return message
    begin, text, rest = lead[0], message[lead.end() :], " " * lead.end()
    command = None if begin.startswith("error") else _COMMAND.search(text)
    lines: list[str] = []
    if prose := text[: command.start()] if command else text:
        whole = _WHOLE.sub(lambda match: match[0].replace(" ", _JOINT), prose)
        filled = textwrap.fill(
            whole,
            wide,
            initial_indent=begin,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(filled.replace(_JOINT, " "))
        begin = rest
    if command:
        lines += command_lines(_WORD.findall(command[0]), begin, rest, wide)
    return "\n".join(lines)
