"""Ranges of settings that recipes, the command and the code share."""

# 4 special tokens, 256 bytes, and a few learned subwords
SMALLEST_VOCABULARY = 301

# outside of these, a length of some thousand tokens raised to the penalty overflows float32
LENGTH_PENALTIES = (-5.0, 5.0)

# below, logits divided by it saturate the softmax; above, all tokens are equally likely
TEMPERATURES = (0.001, 1000.0)
