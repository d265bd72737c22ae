"A probe of what each batch costs, independent of the learner's own books"
from fastai.callback.core import Callback
from fastai_xla.runtime import xla_counts

class Probe(Callback):
    "After everything else, note what has come up since the end of the batch before"
    order = 2000
    def before_fit(self):
        if not hasattr(self, 'gather_preds'): self.rows = []
    def before_train(self): self.last = xla_counts()
    def before_validate(self): self.last = xla_counts()
    def after_batch(self):
        now = xla_counts()
        self.rows.append((self.training, self.iter, now-self.last))
        self.last = now
    def steady(self, training):
        "Costs of the batches of the last fit that the contract is about: from the third in training and in validation, without the first of each validation"
        rows = [c for t,i,c in self.rows if t == training and (t or i > 0)]
        return rows[2 if training else 1:]

def breaches(costs):
    "What of `costs`, one `XLACounts` per batch, breaks the contract"
    return [f'{i}: {c}' for i,c in enumerate(costs) if c.executions != 1 or c.compiles or c.to_host - c.looks or c.fallbacks]
