"""Programs as people write them in notebooks: each has `run(xla, seed, small)`, and the only line about XLA in it is `learn.to_xla()`

They give a dict: `metric` (higher is better), `losses` (of each fit, of all its batches), `learn` (whose last fit is looked at), `others`
(learners whose last fit is looked at as well), and what else is compared: numbers, lists of numbers, texts."""
