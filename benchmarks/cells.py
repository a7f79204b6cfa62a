"""The settings and forms that are measured on a GPU, in order of importance."""

from itertools import product

from forms import KERNELS, Setting

TOKENS, WIDTH = 16_384, 1024
# (d_k, k); the aims are about d 64 and k 16, and about 2,048 tokens and more
TABLES = ((64, 16), (128, 16), (64, 128), (128, 128))
LENGTHS = (4096, 2048, 16_384, 8192, 1024, 512)
FORMS_ON_GPU = (*KERNELS, "flex", "gather", "merged", "triton")


def cells(is_rehearsal: bool) -> list[tuple[Setting, list[str]]]:
    """Settings and their forms, the most important first; for a rehearsal three small ones on the CPU."""
    names = list(FORMS_ON_GPU)
    if is_rehearsal:
        few = ((32, False, False), (32, False, True), (64, True, False))
        return [
            (Setting(length, 1, 1, 16, 4, is_causal=is_causal, has_backward=has_backward), names)
            for length, is_causal, has_backward in few
        ]
    found = []
    for (d_k, k), n, is_causal, has_backward in product(TABLES, LENGTHS, (False, True), (False, True)):
        shape = (n, TOKENS // n, WIDTH // d_k, d_k, k, "bfloat16", "cuda")
        setting = Setting(*shape, is_causal=is_causal, has_backward=has_backward)
        # FlexAttention is compiled for each shape, which takes long
        found.append((setting, [x for x in names if x != "flex" or (d_k, k) == TABLES[0]]))
    return found
