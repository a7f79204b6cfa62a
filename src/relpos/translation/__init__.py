"""The translator: corpora, tokenizer, model, batching, training, generation and evaluation.

Importing it registers the model with transformers' Auto classes.
"""

import sys

# the command imports the model where it needs it: its help text is there at once
if "relpos.cli" not in sys.modules:
    import relpos.translation.model  # noqa: F401
