"""The translator: corpora, tokenizer, model, batching, training, generation and evaluation."""
