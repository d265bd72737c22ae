"State that models keep from batch to batch"
import threading, weakref
from collections import deque
from .base import *
from .models import Net

# State

@scenario
def hidden_state_is_0_first():
    class H(Net):
        def more(self, x):
            self.h = x.detach().mean(0)*.5 + self.h*.5
            return x+self.h
    return learner(H(h=0))

@scenario
def hidden_state_in_a_list():
    class H(Net):
        def more(self, x):
            x = x+self.h[0] if self.h else x
            self.h = [x.detach().mean(0)*.5]
            return x
    return learner(H(h=[]))

@scenario
def hidden_state_in_a_deque():
    class H(Net):
        def more(self, x):
            for h in self.h: x = x+.1*h
            self.h.append(x.detach().mean(0))
            return x
    return learner(H(h=deque(maxlen=3)))

@scenario
def hidden_state_of_a_class():
    class H(Net):
        h = None
        def more(self, x):
            if H.h is not None: x = x+H.h
            H.h = x.detach().mean(0)*.5
            return x
    return learner(H())

@scenario
def hidden_state_in_a_module_global():
    global hidden
    hidden = None
    class H(Net):
        def more(self, x):
            global hidden
            if hidden is not None: x = x+hidden
            hidden = x.detach().mean(0)*.5
            return x
    return learner(H())

@scenario
def hidden_state_in_a_weak_dict():
    states = weakref.WeakKeyDictionary()
    class H(Net):
        def more(self, x):
            x = x+states.get(self, 0.)
            states[self] = x.detach().mean(0)*.5
            return x
    return learner(H())

@scenario
def hidden_state_on_a_generator():
    def states():
        h = 0.
        while True:
            x = yield h
            h = x.detach().mean(0)*.5
    g = states()
    next(g)
    class H(Net):
        def more(self, x): return x+g.send(x)
    return learner(H())
