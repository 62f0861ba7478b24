"""Documents: what partopt reads and writes, one file each; and how they are read and written."""

from partopt.documents.files import check_form, check_writable, is_file, read_bytes, write_bytes
from partopt.documents.reading import (
    Document,
    Note,
    StrictStruct,
    check_option,
    decode,
    encode,
    leaf_faults,
    refuse,
)

__all__ = [
    "Document",
    "Note",
    "StrictStruct",
    "check_form",
    "check_option",
    "check_writable",
    "decode",
    "encode",
    "is_file",
    "leaf_faults",
    "read_bytes",
    "refuse",
    "write_bytes",
]
