"""Levanter's train_lm with its YAML file and its flags, on slices that may be preempted.

    python examples/levanter_yaml.py --tpu v4-32 --num-slices 2 --config_path lm.yaml       # on a Ray cluster
    python examples/levanter_yaml.py --write-data --tpu v4-8 --num-slices 2 --config_path examples/levanter/lm.yaml \\
        --mode "simulate: preempt slice 0 after 60s with 20s notice"                        # on simulated slices

It needs ``pip install '.[levanter]'``, here and on the hosts. Levanter's flags work as usual, for example
``--trainer.num_train_steps 1000``. docs/coming-from-levanter.md says what happens at a preemption.
"""

import argparse
import functools
import json
import pydoc_data.topics
from pathlib import Path

import levanter.config
from levanter.main import train_lm

import iris_ray.levanter


def train(config: train_lm.TrainLmConfig) -> None:
    """Each task of the gang calls this. It continues where an earlier attempt has stopped."""
    iris_ray.levanter.run(train_lm.main, config)


def write_data(text: Path, tokenizer: Path) -> None:
    """Write Python's help pages, and a tokenizer trained on them: the example then needs no network."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    pages = sorted(pydoc_data.topics.topics.values())
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("\n".join(json.dumps({"text": page}) for page in pages))
    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator(pages, vocab_size=512, special_tokens=["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=pairs._tokenizer, bos_token="<end>", eos_token="<end>").save_pretrained(
        tokenizer
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", required=True, help="TPU type, such as v4-32")
    parser.add_argument("--num-slices", type=int, nargs="+", default=[1], help="slice counts to use, such as 2 4")
    parser.add_argument("--mode", help='such as "simulate: kill slice 0 after 60s"')
    parser.add_argument("--write-data", action="store_true", help="first write the text and tokenizer of lm.yaml")
    args, of_levanter = parser.parse_known_args()

    @levanter.config.main(args=of_levanter)
    def read(config: train_lm.TrainLmConfig) -> train_lm.TrainLmConfig:
        return config

    config = read()  # an error in the file or a flag is found here, before a slice is taken
    if args.write_data:
        write_data(Path(config.data.components["help_pages"].source.train_urls[0]), Path(config.data.tokenizer))
    iris_ray.levanter.run_on_pod_multislice_resumable(
        functools.partial(train, config),
        args.tpu,
        args.num_slices,
        preload=iris_ray.levanter.PRELOAD,
        mode=args.mode,
    )


if __name__ == "__main__":
    main()
