"""A reader of LaTeX formulas for the `rkv` grader: a text to a sympy expression, by recursive descent.

It takes the longest beginning that is a formula, as sympy's own reader does, on which the script relies: `3,5,7+1` is
3, `52_8` is 52, and `4+(3,5)` is 4. Where no beginning is one `Unreadable` is raised, and also where the reader meets a
character that no formula has, such as a lone backslash: `14\\` is not 14. An unknown command is a symbol of its name,
and so is `\\pi`.

`read_expression` takes the plain notation `2*x**2`. Python's own parser makes a tree of it and only the nodes named
here are built: nothing is called or looked up.

Not here: which of both is tried, and equality (`rkv_equal.py`).
"""

import ast
import re
from collections.abc import Callable
from typing import Any

import sympy

DEEPEST = 100
# The signs of a formula as sympy's reader has them, and what it steps over, also between the digits of a number. No
# formula has any other character, and no backslash that begins none of these.
SKIP = (
    r"(?:[ \t\r\n]|\\[,:;!*\-./\"(=]|\\(?:left|right)(?![a-zA-Z|])|\\(?:q?quad|(?:neg)?(?:thin|med|thick)space|vrule"
    r"|vcenter|vbox|vskip|vspace|hfil)(?![a-zA-Z]))"
)
TOKEN = re.compile(
    rf"{SKIP}*(?P<token>d[ \t\r\n]*(?:[a-zA-Z]|\\[a-zA-Z]+)|\\(?:left|right)\||\\[a-zA-Z]+|\\[{{}}]|'+"
    r"|&[ \t\r\n]*=|[-+*/(){}\[\]|_^:=<>!,.a-zA-Z0-9]|$|(?P<stranger>[\s\S]))"
)
STRANGER = "\0"  # stands for a character that no formula has
CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")
BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom")
TIMES, OVER = ("*", "\\times", "\\cdot"), ("/", "\\div", ":")
LOGS = ("\\log", "\\ln", "\\lg")
PLAIN = "exp sin cos tan csc sec cot sinh cosh tanh".split()
FUNCTIONS: dict[str, Callable[..., Any]] = {f"\\{name}": getattr(sympy, name) for name in PLAIN}
FUNCTIONS |= {f"\\arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan", "csc", "sec", "cot")}
FUNCTIONS |= {f"\\ar{name}": getattr(sympy, f"a{name}") for name in ("sinh", "cosh", "tanh")}
RELATIONS: dict[str, Callable[..., Any]] = {
    **{"=": sympy.Eq, "<": sympy.Lt, ">": sympy.Gt, "\\neq": sympy.Ne},
    **dict.fromkeys(("\\le", "\\leq", "\\leqq", "\\leqslant"), sympy.Le),
    **dict.fromkeys(("\\ge", "\\geq", "\\geqq", "\\geqslant"), sympy.Ge),
}
STARTS = re.compile(r"[\d(\[{|a-zA-Z]|\\(?:\{|[a-zA-Z])")  # of a factor
ARROWS = ("\\to", "\\rightarrow", "\\Rightarrow", "\\longrightarrow", "\\Longrightarrow")
CLOSES = ("\\}", "\\rfloor", "\\rceil", "\\rangle", "\\left|", "\\right|")
NO_FACTOR = {*TIMES, *OVER, *RELATIONS, *ARROWS, *CLOSES}
DELIMITED = {"\\lfloor": ("\\rfloor", sympy.floor), "\\lceil": ("\\rceil", sympy.ceiling)}


class Unreadable(ValueError):
    """Why a text is no formula."""


class Ends(Unreadable):
    """Why a formula does not go on here: what stands before may be one."""


def read_latex(text: str) -> Any:
    """The formula at the beginning of a text."""
    return Reader(text).relation()


def read_first_line(text: str) -> Any:
    r"""The formula at the beginning of a text's first line or cell: `\\` or `&` ends it, `~` and `$` mean nothing."""
    return read_latex(re.split(r"\\\\|&", text)[0].translate({ord("~"): " ", ord("$"): " "}))


def tokens_of(text: str) -> list[str]:
    """A text's tokens; digits stand alone, since a fraction takes one of them."""
    found = [STRANGER if match["stranger"] else match["token"] for match in TOKEN.finditer(text.strip())]
    return ["=" if "=" in token else token for token in found if token]


class Reader:
    """A text's tokens, and how far they are read."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens_of(text)
        self.at = self.depth = 0
        self.bars = 0  # that are open: the next one closes
        self.sums: dict[tuple[int, bool], tuple[Any, int]] = {}  # that were read once: each its value, and its end

    def peek(self, ahead: int = 0) -> str:
        """The next token, or one after it; "" at the end."""
        at = self.at + ahead
        token = self.tokens[at] if at < len(self.tokens) else ""
        if token == STRANGER:
            raise Unreadable("a character that no formula has")
        return token

    def attempt(self, read: Callable[[], Any]) -> Any:
        """The expression that can be read here; None where the formula ends, and then nothing is stepped over."""
        back = self.at, self.depth, self.bars
        try:
            return read()
        except Ends:
            self.at, self.depth, self.bars = back
            return None

    def take(self, *wanted: str) -> bool:
        """Step over the next token where it is one of these."""
        is_next = self.peek() in wanted and self.peek() != ""
        self.at += is_next
        return is_next

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise Ends(f"{wanted} is missing before {self.peek()!r}")

    # -- from loose to tight --

    def relation(self) -> Any:
        left = self.sum()
        while (relation := RELATIONS.get(self.peek())) is not None:
            self.at += 1
            left = relation(left, self.sum())
        return left

    def sum(self) -> Any:
        """A sum, read once, though what stands before it may be tried in two ways: else brackets cost 2**depth."""
        key = self.at, self.bars > 0
        if key not in self.sums:
            self.sums[key] = self.attempt(self.terms), self.at
        value, self.at = self.sums[key]
        if value is None:
            raise Ends(f"no formula begins with {self.peek()!r}")
        return value

    def terms(self) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable(f"more than {DEEPEST} brackets in each other")
        total = self.product(True)
        while self.peek() in ("+", "-") and (term := self.attempt(self.term)) is not None:
            total = total + term
        self.depth -= 1
        return total

    def term(self) -> Any:
        sign = -1 if self.take("-") else 1
        self.take("+")
        return sign * self.product(True)

    def product(self, functions: bool) -> Any:
        """Factors with signs between; without `functions`, only the first factor of each may be one."""
        value = self.signed(functions)
        while self.peek() in TIMES or self.peek() in OVER:
            divides = self.peek() in OVER
            factor = self.attempt(lambda: self.divisor(functions))
            if factor is None:
                break
            value = value / factor if divides else value * factor
        return value

    def divisor(self, functions: bool) -> Any:
        """The expression after a sign of a product."""
        self.at += 1
        return self.signed(functions)

    def signed(self, functions: bool) -> Any:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.peek() == "-"
            self.at += 1
        factors = [self.power()]
        while self.starts_factor() and (functions or not self.starts_function()):
            factor = self.attempt(self.power)
            if factor is None:
                break
            factors.append(factor)
        value = sympy.Integer(1)
        for i, factor in enumerate(factors):
            if 0 < i < len(factors) - 1 and str(factor) == "x" and is_number(factors[i - 1], factors[i + 1]):
                continue  # 2x3 between numbers: a cross
            value = value * factor
        return -value if negative else value

    def starts_factor(self) -> bool:
        token = self.peek()
        if token == "|" and self.bars:
            return False
        return STARTS.match(token) is not None and token not in NO_FACTOR

    def starts_function(self) -> bool:
        return self.peek() in FUNCTIONS or self.peek() in (*LOGS, "\\sqrt", "\\overline")

    def power(self) -> Any:
        value = self.factor()
        while self.peek() in ("^", "!"):
            if self.take("!"):
                value = sympy.factorial(value)
                continue
            exponent = self.attempt(self.exponent)
            if exponent is None:
                break
            value = sympy.Pow(value, exponent)
        return value

    def exponent(self) -> Any:
        self.need("^")
        value = self.script()
        if self.take("_"):
            self.script()  # means nothing
        return value

    def script(self, most: int | None = None) -> Any:
        """The script after ^ or _: one atom, or a formula in braces; of a number no more than so many digits."""
        if self.peek().isdecimal():
            return self.number(most)
        return self.bracketed() if self.peek() == "{" else self.atom()

    def bracketed(self) -> Any:
        opening = self.peek()
        self.at += 1
        value = self.sum()
        self.need(CLOSING[opening])
        return value

    def factor(self) -> Any:
        token = self.peek()
        if token in CLOSING:
            return self.bracketed()
        if token == "|":
            self.at, self.bars = self.at + 1, self.bars + 1
            value = self.sum()
            self.bars -= 1
            self.need("|")
            return sympy.Abs(value)
        if token in DELIMITED:
            self.at += 1
            closing, function = DELIMITED[token]
            value = self.sum()
            self.need(closing)
            return function(value)
        if self.starts_function():
            return self.function()
        return self.atom()

    # -- functions --

    def function(self) -> Any:
        name = self.peek()
        self.at += 1
        if name == "\\sqrt":
            return self.root()
        if name == "\\overline":
            return sympy.conjugate(self.braced())
        n_digits = 0
        while self.peek(1 + n_digits).isdecimal():
            n_digits += 1
        for most in range(n_digits, -1, -1):  # of `\log_28` one digit is the base, since an argument has to be left
            value = self.attempt(lambda most=most: self.applied(name, most))
            if value is not None:
                return value
        raise Ends(f"{name} has no argument")

    def applied(self, name: str, most: int) -> Any:
        """A function's scripts, of which a number has so many digits at most, and its argument."""
        base = exponent = None
        for _ in range(2):
            if self.take("_"):
                base = self.script(most)
            elif self.take("^"):
                exponent = self.script(most)
        if self.take("("):
            argument = self.arguments()[0]
        else:
            argument = self.product(False)
        if name in LOGS:
            value = sympy.log(argument, base if base is not None else 10 if name == "\\lg" else sympy.E)
        elif exponent == -1 and name[1:] in PLAIN[1:]:
            return getattr(sympy, f"a{name[1:]}")(argument)
        else:
            value = FUNCTIONS[name](argument)
        return value if exponent is None else sympy.Pow(value, exponent)

    def root(self) -> Any:
        index = sympy.Integer(2)
        if self.peek() == "[":
            index = self.bracketed()
        return sympy.root(self.braced(), index)

    def braced(self) -> Any:
        if self.peek() != "{":
            raise Ends(f"{{ is missing before {self.peek()!r}")
        return self.bracketed()

    def arguments(self) -> list[Any]:
        values = [self.sum()]
        while self.take(","):
            values.append(self.sum())
        self.need(")")
        return values

    # -- atoms --

    def atom(self) -> Any:
        token = self.peek()
        if token.isdecimal():
            return self.number()
        if token in FRACTIONS:
            self.at += 1
            above, below = self.part(), self.part()
            return above / below
        if token in BINOMIALS:
            self.at += 1
            return sympy.binomial(self.braced(), self.braced())
        if not re.fullmatch(r"[a-zA-Z]|d\s*\\?[a-zA-Z]+|\\[a-zA-Z]+", token) or token in NO_FACTOR:
            raise Ends(f"{token!r} begins no formula")
        self.at += 1
        if token == "\\infty":
            return sympy.oo
        name = re.sub(r"[\\\s]", "", token)
        if self.take("_"):
            name += f"_{{{self.script()}}}"
        if self.peek().startswith("'"):
            name += self.peek() if token.isalpha() else ""  # a prime after a command is lost
            self.at += 1
        return self.called(name) if self.peek() == "(" else sympy.Symbol(name)

    def number(self, most: int | None = None) -> Any:
        """Digits, groups of three after a comma each, and digits after a point; `most`: so many digits alone."""
        digits = self.digits(most)
        if most is not None:
            return sympy.Number(digits)
        while self.peek() == "," and all(self.peek(i).isdecimal() for i in (1, 2, 3)):
            digits += "".join(self.tokens[self.at + 1 : self.at + 4])
            self.at += 4
        if self.take("."):
            if not self.peek().isdecimal():
                raise Unreadable("a point without digits behind it")
            digits += f".{self.digits()}"
        return sympy.Number(digits)

    def digits(self, most: int | None = None) -> str:
        first = self.at
        while self.peek().isdecimal() and (most is None or self.at - first < most):
            self.at += 1
        if self.at == first:
            raise Ends(f"a digit is missing before {self.peek()!r}")
        return "".join(self.tokens[first : self.at])

    def part(self) -> Any:
        """A numerator or denominator: in braces, or one digit."""
        if self.peek().isdecimal():
            self.at += 1
            return sympy.Number(self.tokens[self.at - 1])
        return self.braced()

    def called(self, name: str) -> Any:
        """`f(x)`; brackets that hold no arguments are a factor of their own."""
        found = self.attempt(self.bracketed_arguments)
        return sympy.Symbol(name) if found is None else sympy.Function(name)(*found)

    def bracketed_arguments(self) -> list[Any]:
        self.need("(")
        return self.arguments()


def is_number(*values: Any) -> bool:
    return not any(value.atoms(sympy.Symbol) for value in values)


# --- plain notation ----------------------------------------------------------------------------

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.Mod: lambda a, b: a % b, ast.FloorDiv: lambda a, b: a // b,
    ast.Pow: lambda a, b: a**b,
}  # fmt: skip
COMPARISONS: dict[type, Callable[..., Any]] = {ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge}
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo}
CALLS = {name: getattr(sympy, name) for name in (*PLAIN, "sqrt", "log", "ln", "Abs", "factorial")}


def read_expression(text: str) -> Any:
    """A formula in Python's notation, as sympy; a tuple, list or set of them as such."""
    try:
        return built(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise Unreadable(str(error)) from None


def built(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(value)):
            return sympy.Integer(value)
        case ast.Constant(value=float()):
            return sympy.Float(node.value)  # type: ignore[attr-defined]
        case ast.Name(id=name):
            return CONSTANTS.get(name, sympy.Symbol(name))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -built(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return built(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](built(left), built(right))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
            return COMPARISONS[type(sign)](built(left), built(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in CALLS:
            return CALLS[name](*map(built, arguments))
        case ast.Tuple(elts=parts):
            return tuple(map(built, parts))
        case ast.List(elts=parts):
            return list(map(built, parts))
        case ast.Set(elts=parts):
            return set(map(built, parts))
    raise Unreadable(f"{type(node).__name__} is no part of a formula")
