"""A byte-level tokenizer of a few hundred ids, made in milliseconds; text survives a round trip.

Not here: anything of a real model. Its templates imitate two habits of real ones: Llama 3 prints
the BOS itself and its tokenizer adds one, ChatML has no BOS of its own.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The phone number of the Paris office is 12345. A sentence ends here . Another one starts.",
    "It was the best of times, it was the worst of times. It was the age of wisdom.",
    "Question: what is the answer? Answer: the text says so.\n\n",
]
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"


def tiny_tokenizer(template: str | None, adds_bos: bool) -> Any:
    """`adds_bos`: whether ordinary tokenising puts `<s>` in front, as Llama's tokenizers do."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|start|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(LINES * 4, trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": specials[2:]})
    tokenizer.chat_template = template
    return tokenizer
