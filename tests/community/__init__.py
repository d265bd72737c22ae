"""Programs as people write them in notebooks: each has `run(xla, seed, small)`, and the only line about XLA in it is `learn.to_xla()`

They give a dict: `metric` (higher is better), `losses` (of all batches), `learn` (whose last fit is looked at),
and what else is worth comparing."""
