"""The scripts that the provider knows by model name: a short greeting, and a coder that writes and runs a program.

The coder's program depends on the prompt only by a few key words; anything else gets a program that looks at the
prompt itself, so that the tool's output is real and fits whatever was asked.
"""

from sandfleet.loadtest.provider.scripts import Conversation, Script, parse_script

GREETING = parse_script({"text": "Hi! How can I help you today?"})

_FIBONACCI = '''\
"""Which of the first 30 Fibonacci numbers are prime?"""


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


a, b = 0, 1
primes = []
for _ in range(30):
    if is_prime(a):
        primes.append(a)
    a, b = b, a + b

print(f"{len(primes)} of the first 30 Fibonacci numbers are prime: {primes}")
'''

_PRIMES = '''\
"""The primes below 100, by the sieve of Eratosthenes."""

LIMIT = 100
sieve = [False, False] + [True] * (LIMIT - 2)
for n in range(2, int(LIMIT**0.5) + 1):
    if sieve[n]:
        sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
primes = [n for n, prime in enumerate(sieve) if prime]

print(f"{len(primes)} primes below {LIMIT}: {primes}")
'''

_PI = '''\
"""Pi to 50 decimal places, by Machin's formula in integers."""

DIGITS = 50
unit = 10 ** (DIGITS + 10)


def arctan_of_inverse(x: int) -> int:
    term = total = unit // x
    n, sign = 3, -1
    while term:
        term //= x * x
        total += sign * (term // n)
        n, sign = n + 2, -sign
    return total


pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)) // 10**10
print(f"pi = 3.{str(pi)[1:]}")
'''

_ANY = '''\
"""Facts about the task, and about the machine that this runs on."""

import collections
import os
import platform
import sys

task = sys.stdin.read().strip()
words = task.split()
letters = collections.Counter(c for c in task.lower() if c.isalpha())
print(f"The task has {len(words)} words and {sum(letters.values())} letters; most frequent: {letters.most_common(3)}")
print(f"This ran on Python {platform.python_version()} in {os.getcwd()} as user id {os.getuid()}")
'''


def _coder(name: str, program: str, opening: str, command: str, *, deep: bool) -> Script:
    """``deep`` calls the tools as deep agents have them: other arguments, absolute paths."""
    where = {"file_path": f"/workspace/{name}"} if deep else {"path": name}
    return parse_script(
        {
            "chunk_chars": 24,
            "chunk_delay_ms": 12,
            "turns": [
                {
                    "text": opening,
                    "tool_calls": [{"name": "write_file", "args": {**where, "content": program}}],
                },
                {
                    "text": "Written. Now I run it.",
                    "tool_calls": [{"name": "execute", "args": {"command": command}}],
                },
                {
                    "text": "I wrote `"
                    + name
                    + "`, ran it in the sandbox, and it printed:\n\n```\n{{last_stdout}}\n```",
                },
            ],
        }
    )


def _coders(*, deep: bool) -> dict[str, Script]:
    """By a word of the task; the empty one is for any other."""
    return {
        "fibonacci": _coder(
            "fibonacci_primes.py",
            _FIBONACCI,
            "I will test the first 30 Fibonacci numbers one by one in a small program.",
            "python3 fibonacci_primes.py",
            deep=deep,
        ),
        "prime": _coder(
            "primes.py",
            _PRIMES,
            "A sieve is the quickest way. I write it as a small program.",
            "python3 primes.py",
            deep=deep,
        ),
        "pi": _coder(
            "pi.py",
            _PI,
            "Machin's formula with integers gives exact digits. I write it down.",
            "python3 pi.py",
            deep=deep,
        ),
        "": _coder(
            "task.py",
            _ANY,
            "I start with a small program that looks at the task.",
            "python3 task.py <<'TASK'\n{{prompt}}\nTASK",
            deep=deep,
        ),
    }


_CODERS = {"scripted-coder": _coders(deep=False), "scripted-deep": _coders(deep=True)}

MODELS = ("scripted", *_CODERS)


def builtin_script(model: str, conversation: Conversation) -> Script:
    """The script of this model name; unknown names greet."""
    if model not in _CODERS:
        return GREETING
    words = "".join(c if c.isalpha() else " " for c in conversation.prompt.lower()).split()
    for key, script in _CODERS[model].items():
        if not key or key in words or f"{key}s" in words:
            return script
    raise AssertionError("the last one fits any task")
