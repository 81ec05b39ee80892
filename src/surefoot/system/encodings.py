"""The encoding that a text which is not UTF-8 seems to have. Standard library only."""

import codecs

LOOK_BYTES = 4096
COMMON = set(
    "的一是不了在人有我他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家十用发天如然"
    "作方成者多日都三小军二无同么经法当起与好看学进种将还分此心前面又定见只主没公从请问答什怎吗您"
)
"""Chinese characters that make up half of most texts."""
LEAST_COMMON = 0.15
"""Their share of the characters beyond ASCII in a text that is taken for Chinese; by chance it would be 0.03."""


def describe_encoding(text: bytes) -> str:
    """Return what a text that is not UTF-8 seems to be, and how to convert the file.

    A wrong guess makes valid UTF-8 of which a model learns nonsense, so an encoding is only named if the text fits it.
    """
    if b"\0" in text[:64] or text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return _describe("UTF-16")
    first = next((index for index, byte in enumerate(text) if byte > 127), 0)
    try:
        decoded = codecs.getincrementaldecoder("gb18030")().decode(text[first : first + LOOK_BYTES])
    except UnicodeDecodeError:
        decoded = ""
    beyond_ascii = [character for character in decoded if character > "\x7f"]
    if len(beyond_ascii) > 1 and sum(each in COMMON for each in beyond_ascii) >= LEAST_COMMON * len(beyond_ascii):
        return _describe("GB18030")
    return "Save it as UTF-8: `iconv -f ENCODING -t UTF-8` converts it from the encoding that it was written in"


def _describe(name: str) -> str:
    return f"It looks like {name}. Save it as UTF-8: iconv -f {name} -t UTF-8 FILE > NEW"
