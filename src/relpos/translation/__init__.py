"""The translator: corpora, tokenizer, model, batching, training, generation and evaluation.

Importing it registers the model with transformers' Auto classes.
"""

import sys

# importing the model takes seconds; the command does it only where it needs the model
if "_relpos_command" not in sys.modules:
    import relpos.translation.model  # noqa: F401
