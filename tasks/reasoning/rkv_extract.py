"""R-KV's extraction and clean-up of an answer: text to text, each rule in the order in which it applies.

The script goes back to Qwen2.5-Math and MATH's own normalisation; it is reproduced with its oddities, since published
numbers hang on them: a unit is any word of the list below, also the letter `o`; a word for a number anywhere makes the
whole answer that number.

Not here: when two cleaned answers are equal (`rkv_equal.py`).
"""

import re

# In the order in which they are taken out: one can leave another behind.
UNITS = (
    "east|degree|mph|kmph|ft|m sqaure| m east|sq m|deg|mile|q .|monkey|prime|ratio|profit of rs|rd|o|gm|p . m|lb|tile|"
    "per|dm|lt|gain|ab|way|west|a .|b .|c .|d .|e .|f .|g .|h .|t|a|h|no change|men|soldier|pie|bc|excess|st|inches|"
    "noon|percent|by|gal|kmh|c|acre|rise|a . m|th|π r 2|sq|mark|l|toy|coin|sq . m|gallon|° f|profit|minw|yr|women|"
    "feet|am|pm|hr|cu cm|square|v â € ™|are|rupee|rounds|cubic|cc|mtr|s|ohm|number|kmph|day|hour|minute|min|second|"
    "man|woman|sec|cube|mt|sq inch|mp|∏ cm ³|hectare|more|sec|unit|cu . m|cm 2|rs .|rs|kg|g|month|km|m|cm|mm|apple|"
    "liter|loss|yard|pure|year|increase|decrease|d|less|Surface|litre|pi sq m|s .|metre|meter|inch"
).split("|")
UNIT_PATTERNS = [re.compile(rf"(^|\W){unit}{plural}($|\W)") for plural in ("", "s") for unit in UNITS]
LAST_NUMBER = re.compile(r"-?\d*\.?\d+")

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
NUMBERS = {word: value for value, word in enumerate(f"{ONES} eighteen nineteen".split())}
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS |= {word: 10 * tens for tens, word in enumerate(TENS.split(), 2)} | {"hundred": 100}
SCALES = {"thousand": 1000, "million": 1_000_000, "billion": 1_000_000_000}


# --- extraction --------------------------------------------------------------------------------


def extract(text: str) -> str:
    """What a text gives as its answer, cleaned; "" where it gives none."""
    found = find(text.replace("ки", ""))
    found = re.sub(r"\n\s*", "", found).removeprefix(":").removesuffix(".").removesuffix("/")
    return clean(found)


def find(text: str) -> str:
    """The answer as it stands in the text, by the first rule that applies."""
    if "final answer is $" in text and "$. I hope" in text:
        return text.split("final answer is $", 1)[1].split("$. I hope", 1)[0].strip()
    if "boxed" in text:
        return in_box(text.rpartition("boxed")[2])
    for phrase in ("he answer is", "final answer is"):
        if phrase in text:
            return text.rpartition(phrase)[2].strip()
    if "答案是" in text:
        return text.split("答案是")[1].strip().split("\n\n")[0].strip()
    numbers = LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""


def in_box(text: str) -> str:
    """What follows the word "boxed": up to the matching brace, or to the end; without a brace up to a dollar sign."""
    if not text.startswith("{"):
        return text.split("$")[0].strip()
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[1:at]
    return text[1:]


# --- clean-up ----------------------------------------------------------------------------------


def clean(text: str) -> str:
    """An answer without units, markup and blanks, its fractions in one form."""
    text = text.strip().replace("\n", "").rstrip(".").replace("\\!", "")
    text = re.sub(r"\\begin\{array\}\{.*?\}", r"\\begin{pmatrix}", text).replace("\\end{array}", "\\end{pmatrix}")
    text = replaced(
        text,
        *(("bmatrix", "pmatrix"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\neq", "\\ne"), ("\\leq", "\\le")),
        *(("\\geq", "\\ge"), ("\\left", ""), ("\\right", ""), ("\\{", "{"), ("\\}", "}")),
    )
    text = re.sub(r"\\text{.*?}$", "", text).strip() or text
    for _ in range(2):
        for pattern in UNIT_PATTERNS:
            text = pattern.sub(r"\1\2", text) or text
    text = replaced(text, *((sign, "") for sign in ("^{\\circ}", "^\\circ", "\\$", "$", "\\(", "\\)")))
    text = re.sub(r"\\text\{(.*?)\}", r"\1", number_in_words(text))
    text = replaced(text, *((f"{name}{sign}", "") for sign in ("=", "\\in", "\\to") for name in "xyz"))
    text = replaced(text, ("\\emptyset", "{}"), ("(-\\infty,\\infty)", "\\mathbb{R}"), ("\\%", ""), ("%", ""))
    text = replaced(text, (" .", " 0."), ("{.", "{0."), ("infinity", "\\infty"))
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = replaced(text, ("+\\inity", "\\infty"), ("and", ""), ("\\mathbf", ""))
    text = re.sub(r"\\mbox{.*?}", "", text)
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = re.sub(r"(\d+)\.0*([^\d])", r"\1\2", text)
    text = re.sub(r"(\d+)\.0*$", r"\1", text)
    return tidied(text) if text else text


def tidied(text: str) -> str:
    """The last steps: a short left side of an equation goes, roots and fractions get their braces."""
    if text.startswith("."):
        text = f"0{text}"
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:
        (text,) = right
    text = re.sub(r"\\sqrt(\w+)", r"\\sqrt{\1}", text).replace(" ", "")
    return slash_as_fraction(with_braces(text))


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def with_braces(text: str) -> str:
    r"""`\frac12` as `\frac{1}{2}`, `\frac1{72}` as `\frac{1}{72}`; a text that ends too early stays as it is."""
    first, *rest = text.split("\\frac")
    pieces = [first]
    for piece in rest:
        if not piece.startswith("{"):
            if len(piece) < 2:
                return text
            below = piece[1:] if piece[1] == "{" else f"{{{piece[1]}}}{piece[2:]}"
            piece = f"{{{piece[0]}}}{below}"
        pieces.append(piece)
    return "\\frac".join(pieces)


def slash_as_fraction(text: str) -> str:
    """`a/b` as a fraction, where each side is a plain whole number or holds a root."""
    above, slash, below = text.partition("/")
    if not slash or "/" in below or not all("sqrt" in side or is_plain_integer(side) for side in (above, below)):
        return text
    return f"\\frac{{{above}}}{{{below}}}"


def is_plain_integer(text: str) -> bool:
    """Whether Python writes this integer in the same way."""
    return re.fullmatch(r"0|-?[1-9][0-9]*", text) is not None


# --- numbers in words --------------------------------------------------------------------------


def number_in_words(text: str) -> str:
    """A text that names a number in English words as that number; other words in it are lost."""
    lowered = text.replace("-", " ").lower()
    if lowered.isdigit():
        return str(int(lowered)) if lowered.isdecimal() else text
    words = [word for word in lowered.split() if word in NUMBERS or word in SCALES or word == "point"]
    if not words or any(words.count(word) > 1 for word in (*SCALES, "point")):
        return text
    whole, decimals = words, list[str]()
    if "point" in words:
        at = words.index("point")
        whole, decimals = words[:at], words[at + 1 :]
    value = whole_number(whole)
    if value is None or any(word not in NUMBERS or NUMBERS[word] > 9 for word in decimals):
        return text
    if decimals:
        return str(value + float("0." + "".join(str(NUMBERS[word]) for word in decimals)))
    return str(value)


def whole_number(words: list[str]) -> int | None:
    """The value of a number's words; None where scales stand in a wrong order."""
    if not words:
        return 0
    if len(words) == 1:
        return {**NUMBERS, **SCALES}[words[0]]
    places = [words.index(scale) for scale in ("billion", "million", "thousand") if scale in words]
    if places != sorted(places):
        return None
    total, at = 0, 0
    for place in places:
        group = below_thousand(words[at:place])
        if group is None:
            return None
        total, at = total + group * SCALES[words[place]], place + 1
    rest = below_thousand(words[at:]) if at < len(words) else 0
    return None if rest is None else total + rest


def below_thousand(words: list[str]) -> int | None:
    """Up to four words; of more, the first one counts, as in the script."""
    values = [NUMBERS[word] for word in words]
    match values:
        case []:
            return None
        case [hundreds, hundred, tens, ones]:
            return hundreds * hundred + tens + ones
        case [hundreds, hundred, rest]:
            return hundreds * hundred + rest
        case [first, second]:
            return first * second if 100 in values else first + second
        case [first, *_]:
            return first
