"""A probe of what each batch costs

The costs are the device's own counters, and nothing is taken off them. One thing the probe asks the learner's replay:
was this batch traced in order to be recorded? That decides nothing but whether a batch may be left out, of which there
is a fixed number: whoever records more often has broken the contract."""
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
        now,replay = xla_counts(),getattr(getattr(self.learn, 'xla_opt', None), 'replay', None)
        cost,self.last = now-self.last,now
        cost.traced,cost.audited = bool(replay and replay.step.batch.tracing),bool(replay and replay.step.batch.auditing)
        self.rows.append((self.training, self.iter, cost))
    def steady(self, training, late=0):
        """Costs of the batches of the last fit that the contract is about

        From the third in training and in validation, without the first of each validation.
        The first two are recorded and looked at once more; so may be two batches of each of `late` kinds of step that come later.
        Audits are left out: at most one where a dataloader begins, and one at each power of two"""
        res,left = [],2*late
        n_audits,starts = sum(c.audited for t,_,c in self.rows if t == training),sum(i == 0 for t,i,_ in self.rows if t == training)
        assert n_audits <= starts + (1+late)*len(self.rows).bit_length()
        for c in [c for t,i,c in self.rows if t == training and (t or i > 0)][2 if training else 1:]:
            if c.audited: continue
            if c.traced and left: left -= 1
            else: res.append(c)
        return res

def breaches(costs, executions=1):
    """What of `costs`, one of a `Probe` per batch, breaks the contract

    `executions` is 1, or one more where a program of somebody else's runs beside the step"""
    return [f'{i}: {c}{", traced" if c.traced else ""}'
            for i,c in enumerate(costs) if c.executions != executions or c.compiles or c.to_host - c.looks or c.fallbacks or c.traced]
