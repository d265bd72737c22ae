"What a fit leaves with several steps as one, compared with the CPU and with retraced steps"
import warnings
from by_log import *

def fitted(story, n=2, **to):
    "What a fit leaves, on the CPU without `to`; the learner, and why steps have been run one by one"
    for seed in (torch.manual_seed, np.random.seed, random.seed, manual_seed): seed(3)
    kwargs,see = story()
    model = kwargs.pop('model', None) or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    learn = Learner(data(), model, **dict(loss_func=F.mse_loss) | kwargs)
    if to: learn.to_xla(**to)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n, 1e-2)
    left = [float(o) for o in learn.recorder.losses],list(host(learn.model.state_dict()).values()),host(see(learn))
    return left,learn,[str(w.message) for w in told if 'run one by one' in str(w.message)]

def agrees(story, why, k=3, n=2):
    """The same losses, weights and what the story sees; one by one for the reason `why`, or as one without. The learner that ran several

    Steps that run one by one are held against the CPU alone: one that runs too late or twice is far from it"""
    cpu,(several,learn,told) = fitted(story, n)[0],fitted(story, n, steps_per_execution=k)
    plain = several if why else fitted(story, n, replay=False)[0]
    for a,b,c in zip(*map(leaves, (cpu, plain, several)), strict=True):
        torch.testing.assert_close(*map(torch.as_tensor, (c, b)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*map(torch.as_tensor, (c, a)), rtol=1e-3, atol=1e-4, check_dtype=False)
    assert len(told) == bool(why) and (why or '') in ''.join(told), told
    return learn
