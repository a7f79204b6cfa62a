"""Sentence splitting for texts that are too long to translate as a whole.

Sentence ends follow Unicode's annex 29, with two changes: a short capitalised word before a full stop may be
an abbreviation, and a sentence does not end before a lower-case letter. Long sentences are split at clause
marks or between words.
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


def split_text(text: str, longest: int, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Split a normalised text into sentences, and long sentences into pieces.

    A piece has at most `longest` subwords, including the end token. It ends at a clause mark near the middle
    of the sentence if there is one, otherwise between words, and inside a word only as a last resort. Only
    spaces are dropped.
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
        # 2: the end token, and the space that is added to a piece beginning inside a word
        if subwords + 2 <= longest or stop - start < 2:
            pieces.append(text[start:stop].strip())
            continue
        place = _place(start, stop, ends)
        rest += [(place, stop), (start, place)]
    return [piece for piece in pieces if piece]


def _place(start: int, stop: int, ends: list[list[int]]) -> int:
    """Where to split text[start:stop]: the strongest end in its middle half, nearest to the middle."""
    middle, quarter = (start + stop) // 2, (stop - start) // 4
    for places in ends:
        near = bisect_left(places, middle)
        for place in sorted(places[max(0, near - 1) : near + 1], key=lambda place: abs(place - middle)):
            if start + quarter <= place <= stop - quarter and start < place < stop:
                return place
    return middle
