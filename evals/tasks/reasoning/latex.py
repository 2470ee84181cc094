"""A reader of LaTeX formulas for the `rkv` grader: a text to a sympy expression, by recursive descent.

It takes the longest beginning that is a formula, as sympy's own reader does, on which the script relies: `3,5,7+1` is
3, and `52_8` is 52. Inside of brackets everything must be read, else `Unreadable` is raised. An unknown command is a
symbol of its name, and so is `\\pi`.

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
TOKEN = re.compile(
    r"(?:\s|\\[,!;:> ]|\\(?:left|right|quad|qquad|thinspace|displaystyle)(?![a-zA-Z]))*"
    r"(?P<token>\d+(?:,\d{3})*(?:\.\d+)?|d\s*(?:[a-zA-Z]|\\[a-zA-Z]+)|\\[a-zA-Z]+|\\[{}|]|'+|[a-zA-Z]|[^\s])"
)
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
NO_FACTOR = {*TIMES, *OVER, *RELATIONS, "\\}", "\\|"}
DELIMITED = {"\\lfloor": ("\\rfloor", sympy.floor), "\\lceil": ("\\rceil", sympy.ceiling)}


class Unreadable(ValueError):
    """Why a text is no formula."""


def read_latex(text: str) -> Any:
    """The formula at the beginning of a text."""
    return Reader(text).relation()


class Reader:
    """A text's tokens, and how far they are read."""

    def __init__(self, text: str) -> None:
        self.tokens = [found["token"] for found in TOKEN.finditer(text.strip())]
        self.at = self.depth = 0
        self.bars = 0  # that are open: the next one closes

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> bool:
        """Step over the next token where it is one of these."""
        is_next = self.peek() in wanted and self.peek() != ""
        self.at += is_next
        return is_next

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise Unreadable(f"{wanted} is missing before {self.peek()!r}")

    # -- from loose to tight --

    def relation(self) -> Any:
        left = self.sum()
        while (relation := RELATIONS.get(self.peek())) is not None:
            self.at += 1
            left = relation(left, self.sum())
        return left

    def sum(self) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable(f"more than {DEEPEST} brackets in each other")
        total = self.product(True)
        while self.peek() in ("+", "-"):
            sign = -1 if self.peek() == "-" else 1
            self.at += 1
            total = total + sign * self.product(True)
        self.depth -= 1
        return total

    def product(self, functions: bool) -> Any:
        """Factors with signs between; without `functions`, only the first factor of each may be one."""
        value = self.signed(functions)
        while self.peek() in TIMES or self.peek() in OVER:
            divides = self.peek() in OVER
            self.at += 1
            factor = self.signed(functions)
            value = value / factor if divides else value * factor
        return value

    def signed(self, functions: bool) -> Any:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.peek() == "-"
            self.at += 1
        factors = [self.power()]
        while self.starts_factor() and (functions or not self.starts_function()):
            factors.append(self.power())
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
        return STARTS.match(token) is not None and token not in NO_FACTOR and token not in ("\\rfloor", "\\rceil")

    def starts_function(self) -> bool:
        return self.peek() in FUNCTIONS or self.peek() in (*LOGS, "\\sqrt", "\\overline")

    def power(self) -> Any:
        value = self.factor()
        while self.peek() in ("^", "!"):
            if self.take("!"):
                value = sympy.factorial(value)
                continue
            back = self.at
            self.at += 1
            if not self.starts_factor():
                self.at = back  # what follows is no exponent: the formula ends before the sign
                break
            value = sympy.Pow(value, self.script())
        return value

    def script(self) -> Any:
        """What stands behind ^ or _: one token, or a formula in braces."""
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
        base = exponent = None
        for _ in range(2):
            if self.take("_"):
                base = self.script()
            elif self.take("^"):
                exponent = self.script()
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
            raise Unreadable(f"{{ is missing before {self.peek()!r}")
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
        if token[:1].isdecimal():
            self.at += 1
            return sympy.Number(token.replace(",", ""))
        if token in FRACTIONS:
            self.at += 1
            above, below = self.part(), self.part()
            return above / below
        if token in BINOMIALS:
            self.at += 1
            return sympy.binomial(self.braced(), self.braced())
        if not re.fullmatch(r"[a-zA-Z]|d\s*\\?[a-zA-Z]+|\\[a-zA-Z]+", token) or token in NO_FACTOR:
            raise Unreadable(f"{token!r} begins no formula")
        self.at += 1
        if token == "\\infty":
            return sympy.oo
        name = re.sub(r"[\\\s]", "", token)
        if self.take("_"):
            name += f"_{{{self.script()}}}"
        if self.peek().startswith("'"):
            name += self.peek()
            self.at += 1
        return self.called(name) if self.peek() == "(" else sympy.Symbol(name)

    def part(self) -> Any:
        """A numerator or denominator: in braces, or one digit."""
        token = self.peek()
        if token[:1].isdecimal():
            self.tokens[self.at : self.at + 1] = filter(None, (token[0], token[1:].lstrip(",")))
            self.at += 1
            return sympy.Number(token[0])
        return self.braced()

    def called(self, name: str) -> Any:
        """`f(x)`; brackets that hold no arguments are a factor of their own."""
        back = self.at
        self.at += 1
        try:
            return sympy.Function(name)(*self.arguments())
        except Unreadable:
            self.at = back
            return sympy.Symbol(name)


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
