"""Fine-tune a relpos model on your own pairs with transformers' Seq2SeqTrainer, then translate a line.

python examples/finetune.py runs/mine/model pairs.tsv tuned --line "A man is reading."
"""

import argparse
from pathlib import Path

import datasets
import transformers as tf

import relpos.translation  # noqa: F401 - the Auto classes then know relpos


def read_pairs(path: Path) -> list[list[str]]:
    pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise SystemExit(f"{path}, line {number}: must be source, tab, target; got {len(pair)} columns.")
    return pairs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="folder of a relpos model")
    parser.add_argument("pairs", type=Path, help="text file: source, tab, target")
    parser.add_argument("out", type=Path, help="new folder for the tuned model")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank (needs peft)")
    parser.add_argument("--line", help="a line to translate afterwards")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"argument out: {options.out} must be a new folder; it exists. Name another.")
    model = tf.AutoModelForSeq2SeqLM.from_pretrained(options.model)
    tokenizer = tf.AutoTokenizer.from_pretrained(options.model)
    pairs = read_pairs(options.pairs)
    rows = [{**tokenizer(source), "labels": tokenizer(target).input_ids} for source, target in pairs]
    data = datasets.Dataset.from_list(rows).train_test_split(0.1, seed=1)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        parts = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
        lora = LoraConfig(task_type="SEQ_2_SEQ_LM", r=options.lora, target_modules=parts)
        model = get_peft_model(model, lora)
    settings = {"num_train_epochs": options.epochs, "learning_rate": options.learning_rate}
    settings |= {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    training = tf.Seq2SeqTrainingArguments(str(options.out / "checkpoints"), **settings)
    collator = tf.DataCollatorForSeq2Seq(tokenizer, model=model)
    tf.Seq2SeqTrainer(model, training, collator, data["train"], data["test"], tokenizer).train()
    model = model.merge_and_unload() if options.lora else model
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    if options.line:
        ids = model.eval().generate(**tokenizer(options.line, return_tensors="pt").to(model.device))
        print(tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
