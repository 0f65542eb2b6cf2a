"""Fine-tuning on conversations: the assistant's turns are learned, the rest is read.

Full fine-tuning with the values of Tulu 3 8B (Lambert et al. 2024, arXiv 2411.15124), whose batch
has 128 conversations of up to 4,096 tokens; here it has as many rows, each full of conversations.
Low-rank factors at the rate of QLoRA (Dettmers et al. 2023, arXiv 2305.14314), whose base here is
not quantised. Both as in the commands that their authors published. The conversations are yours:
--data.corpus.files. docs/how-to/fine-tune.md.
"""

from __future__ import annotations

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.hugging_face.config import Initial
from armillary.data.config import Bpe, Chat, Data, File, WholeDocuments
from armillary.models.llama import Llama, llama3
from armillary.models.tuning.config import LoRA
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Constant, Linear
from armillary.parallel.config import Compile, Full
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe

TULU = (
    "Tulu 3 8B, arXiv 2411.15124, by scripts/train/finetune/tulu_finetune_mix.sh in "
    "allenai/open-instruct"
)
QLORA = "QLoRA, arXiv 2305.14314, by scripts/finetune_llama2_guanaco_7b.sh in artidoro/qlora"
BASE = "hf:meta-llama/Llama-3.1-8B"
VOCABULARY = 1024

_CHAT = {
    "data.corpus": "ours: conversations, which are yours to choose",
    "data.packing": "ours: no row begins in the middle of a conversation",
    "data.bos": "ours: the chat template writes a BOS where the format has one",
    "data.eos": "ours: the chat template ends turns",
}
_LLAMA = _CHAT | {
    "model": "Llama 3 herd, arXiv 2407.21783, section 3.2; stretched positions: config.json of "
    "meta-llama/Llama-3.1-8B",
    "initial.weights": "ours: a base model whose format of conversations is published",
    "data.tokenizer": "ours: the family's own, a tokenizer.json beside the model card",
    "budget.steps": "ours: a first look; two epochs of your conversations are usual",
    "activation_checkpoint": "ours: as much is kept as the estimate of memory leaves room for",
    "compile.enabled": "ours: faster, as measured by TorchTitan, arXiv 2410.06511",
    "validation.every": "ours: ten looks on the way",
    "checkpoint.every": "ours: as often as a look at validation",
}


@recipe(
    "sft-debug",
    family="fine-tuning",
    gpus=0,
    sources=_CHAT
    | {
        "model": "ours: that of debug, with room for a vocabulary of words",
        "data.tokenizer": "ours: learned from the conversations, with chatml's tokens",
        "budget": "ours: seconds on a CPU",
        "validation": "ours: seconds on a CPU",
    },
)
def sft_debug() -> Recipe:
    """A tiny Llama on conversations, from nothing: for trying formats out on a CPU."""
    return Recipe(
        model=Llama(
            vocab_size=VOCABULARY,
            dim=128,
            n_layers=4,
            n_heads=8,
            n_kv_heads=4,
            ffn_dim=384,
            max_seq_len=1024,
        ),
        data=Data(
            corpus=Chat(template="chatml"),
            tokenizer=Bpe(vocab_size=VOCABULARY, special=("<|im_start|>", "<|im_end|>")),
            packing=WholeDocuments(),
            bos=False,
            eos=False,
        ),
        budget=Budget(steps=20, batch_tokens=2048, seq_len=256),
        validation=Validation(sequences=16, final_sequences=16),
    )


@recipe(
    "sft-llama3-8b",
    family="fine-tuning",
    gpus=8,
    sources=_LLAMA
    | {
        "budget.batch_tokens": f"128 rows of 4,096: {TULU}; its rows hold one conversation",
        "budget.seq_len": TULU,
        "optimizer.lr": TULU,
        "optimizer.weight_decay": TULU,
        "schedule": TULU,
        "schedule.warmup_fraction": TULU,
    },
)
def sft_llama3_8b() -> Recipe:
    """Llama 3.1 8B, all its weights, on your conversations in the format of Llama 3."""
    return Recipe(
        model=llama3("8B", release="3.1"),
        initial=Initial(weights=BASE),
        data=_conversations(),
        budget=Budget(steps=1000, batch_tokens=128 * 4096, seq_len=4096),
        optimizer=AdamW(lr=5e-6, weight_decay=0.0),
        schedule=Linear(warmup_fraction=0.03),
        activation_checkpoint=Full(),
        compile=Compile(enabled=True),
        validation=Validation(every=100),
        checkpoint=Checkpoint(every=100),
    )


@recipe(
    "lora-llama3-8b",
    family="fine-tuning",
    gpus=1,
    sources=_LLAMA
    | {
        "tuning": f"Hu et al. 2021, arXiv 2106.09685; on all linear layers: {QLORA}",
        "budget.batch_tokens": f"16 rows: {QLORA}, of 512 tokens; their length: ours",
        "budget.seq_len": TULU,
        "optimizer.lr": QLORA,
        "optimizer.weight_decay": QLORA,
        "schedule": QLORA,
        "schedule.warmup_fraction": QLORA,
    },
)
def lora_llama3_8b() -> Recipe:
    """Llama 3.1 8B, low-rank factors beside its weights, on your conversations; one GPU."""
    return Recipe(
        model=llama3("8B", release="3.1"),
        initial=Initial(weights=BASE),
        tuning=LoRA(),
        data=_conversations(),
        budget=Budget(steps=1000, batch_tokens=16 * 4096, seq_len=4096),
        optimizer=AdamW(lr=2e-4, weight_decay=0.0),
        schedule=Constant(warmup_fraction=0.03),
        activation_checkpoint=Full(),
        compile=Compile(enabled=True),
        validation=Validation(every=100),
        checkpoint=Checkpoint(every=100),
    )


def _conversations() -> Data:
    return Data(
        corpus=Chat(template="llama3"),
        tokenizer=File(),
        packing=WholeDocuments(),
        bos=False,
        eos=False,
    )
