"""Cutting a text that is too long to be translated whole: at sentence ends, at clause marks, between words.

Sentence ends are those of Unicode's annex 29, with two changes: a short word with a capital before the full
stop may be an abbreviation, and a lower-case letter goes on with the sentence.
"""

from bisect import bisect_left
from itertools import pairwise

import regex
from transformers import PreTrainedTokenizerFast

_CLOSING = r"\p{SB=Close}*+"
_SENTENCE_END = regex.compile(
    r"(?<![\p{SB=STerm}\p{SB=ATerm}])"
    # in scripts with spaces: full stop, or question and exclamation marks
    rf"(?:(?:(?<!\b\p{{Lu}}\p{{L}}{{0,2}})\p{{SB=ATerm}}|\p{{SB=STerm}})[\p{{SB=STerm}}\p{{SB=ATerm}}]*+{_CLOSING}"
    rf"(?= (?!{_CLOSING}\p{{Ll}}))"
    # in scripts without
    rf"|(?:(?![!?])\p{{SB=STerm}})++{_CLOSING})"
)
_CLAUSE_END = regex.compile(r"\p{SB=SContinue}(?= )|[\u3001\uff0c\uff1b\uff1a]")
_WORD_END = regex.compile(r"(?= )")


def cut(text: str, longest: int, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The sentences of a normal text; those of more than `longest` subwords, end mark included, in pieces.

    A piece ends at a clause mark where there is one near the middle of what is too long, otherwise between
    words, and inside a word only where nothing else is left. Nothing but spaces is lost.
    """
    starts = [
        start for start, _ in tokenizer(text, return_offsets_mapping=True, verbose=False).offset_mapping[:-1]
    ]
    ends = [[match.end() for match in pattern.finditer(text)] for pattern in (_CLAUSE_END, _WORD_END)]
    borders = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    rest = [(start, stop) for start, stop in pairwise(borders) if start < stop][::-1]
    pieces = []
    while rest:
        start, stop = rest.pop()
        subwords = bisect_left(starts, stop) - bisect_left(starts, start)
        # the end mark, and the space that a piece gets which begins inside a word
        if subwords + 2 <= longest or stop - start < 2:
            pieces.append(text[start:stop].strip())
            continue
        place = _place(start, stop, ends)
        rest += [(place, stop), (start, place)]
    return [piece for piece in pieces if piece]


def _place(start: int, stop: int, ends: list[list[int]]) -> int:
    """Where to cut text[start:stop]: the strongest end nearest to the middle, of its middle half."""
    middle, quarter = (start + stop) // 2, (stop - start) // 4
    for places in ends:
        near = bisect_left(places, middle)
        for place in sorted(places[max(0, near - 1) : near + 1], key=lambda place: abs(place - middle)):
            if start + quarter <= place <= stop - quarter and start < place < stop:
                return place
    return middle
