"""The pattern of accelerate's examples/nlp_example.py on made data: BERT, padded batches, an evaluation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import BertConfig, BertForSequenceClassification

set_seed(42)
accelerator = Accelerator()
config = BertConfig(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(8, 33, (224,), generator=generator).tolist()
rows = [
    (torch.randint(1, 300, (length,), generator=generator), number % 2)
    for number, length in enumerate(lengths)
]


def collate(examples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([words for words, _ in examples], batch_first=True)
    labels = torch.tensor([label for _, label in examples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


train = torch.utils.data.DataLoader(rows, shuffle=True, collate_fn=collate, batch_size=8)
held_out = torch.utils.data.DataLoader(rows[:32], collate_fn=collate, batch_size=8)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-4)
model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
model.train()
for batch in train:
    outputs = model(**batch)
    accelerator.backward(outputs.loss)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
for batch in held_out:
    with torch.no_grad():
        outputs = model(**batch)
    accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
