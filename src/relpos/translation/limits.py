"""Bounds that a recipe, the command and the code itself share."""

# 4 marks, 256 bytes, and subwords enough that there is something to learn
SMALLEST_VOCABULARY = 301

# beyond these a length of some thousand tokens, raised to the penalty, leaves float32
LENGTH_PENALTIES = (-5.0, 5.0)

# below, logits over it leave the range where a softmax tells them apart; above, all tokens are as likely
TEMPERATURES = (0.001, 1000.0)

# CPU seconds in which a regular expression judges one text; a sane one needs microseconds
REGEX_SECONDS = 2.0
