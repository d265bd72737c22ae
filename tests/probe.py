"A probe of what each batch costs, independent of the learner's own books"
from fastai.callback.core import Callback
from fastai_xla.runtime import xla_counts

class Probe(Callback):
    "After everything else, note what has come up since the end of the batch before"
    order,prepared = 2000,0
    def before_fit(self):
        if not hasattr(self, 'gather_preds'): self.rows,self.traced = [],[]
    def before_train(self): self.last = xla_counts()
    def before_validate(self): self.last = xla_counts()
    def after_batch(self):
        now,at = xla_counts(),self.last
        replay = getattr(getattr(self.learn, 'xla_opt', None), 'replay', None)
        cost = now-at
        if replay: cost.executions,self.prepared = cost.executions-(replay.prepared-self.prepared),replay.prepared   # programs of callbacks around the step
        self.rows.append((self.training, self.iter, cost))
        self.traced.append(bool(replay and replay.tracing))
        self.last = now
    def steady(self, training):
        "Costs of the batches of the last fit that the contract is about: from the third in training and in validation, without the first of each validation and those that are traced to be recorded"
        rows = [(c, r) for (t,i,c),r in zip(self.rows, self.traced) if t == training and (t or i > 0)]
        return [c for c,r in rows[2 if training else 1:] if not r]

def breaches(costs):
    "What of `costs`, one `XLACounts` per batch, breaks the contract"
    return [f'{i}: {c}' for i,c in enumerate(costs) if c.executions != 1 or c.compiles or c.to_host - c.looks or c.fallbacks]
