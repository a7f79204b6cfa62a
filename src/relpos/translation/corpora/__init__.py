"""Parallel text: read from files, data sets and catalogs, cleaned, and split without near-duplicates."""

from relpos.translation.corpora.cleaning import CleaningReport, CleaningRules, clean
from relpos.translation.corpora.corpus_cache import check_corpus, join_corpora, read_corpus, recall_corpus
from relpos.translation.corpora.corpus_spec import Source
from relpos.translation.corpora.numbers import NumberLines
from relpos.translation.corpora.splitting import split
from relpos.translation.corpora.text_lines import MAX_LINE_BYTES, read_arrived, read_lines

__all__ = [
    "MAX_LINE_BYTES",
    "CleaningReport",
    "CleaningRules",
    "NumberLines",
    "Source",
    "check_corpus",
    "clean",
    "join_corpora",
    "read_arrived",
    "read_corpus",
    "read_lines",
    "recall_corpus",
    "split",
]
