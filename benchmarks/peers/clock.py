"What is measured of each peer, and how, in one place"
import json, os, resource, sys, time

def rss_mb(): return int(open('/proc/self/statm').read().split()[1])*os.sysconf('SC_PAGESIZE')/2**20
def no_counts(): return {}

def xla_counts():
    "torch_xla's own counters, the same for every peer on torch_xla"
    import torch_xla.debug.metrics as met
    data = lambda name: met.metric_data(name) or (0, 0.)
    names = dict(compiles='CompileTime', executions='ExecuteTime', to_host='TransferFromDeviceTime', to_device='TransferToDeviceTime')
    return {k: data(v)[0] for k,v in names.items()} | dict(compile_s=data('CompileTime')[1]/1e9, sent_kb=data('OutboundData')[1]/1e3)

class Missing(Exception): "Raised by a peer that cannot run; its text is printed"

class Clock:
    """Times and counts the training part of each epoch; validation is left out

    `wall_ms` is from the first request for a batch until the device has finished the epoch's last step, divided by the steps.
    `host_ms` is the CPU time of the training thread in it (`time.thread_time`): tracing, dispatch, callbacks,
    and data loading where it is in that thread. Waiting costs none.
    `cpu_ms` is the CPU time of all threads of the process, the device's own where the device is a CPU.
    `first_s` is from before the model is made until the first step's result is there; `compile_s` is compiling only, in training.
    All counts are per step of the epoch, except `compiles`: all in training so far, and `late_compiles`: those in this epoch."""
    def __init__(self, cfg, counts=no_counts, wait=lambda: None, first=1):
        self.cfg,self.counts,self.wait,self.first = cfg,counts,wait,first
        self.epoch,self.steps,self.first_s,self.total,self.start = 0,0,None,{},time.perf_counter()

    def tell(self, **kw): print(json.dumps(kw), file=self.cfg.out)

    def now(self):
        return dict(wall_ms=time.perf_counter()*1e3, host_ms=time.thread_time()*1e3, cpu_ms=time.process_time()*1e3) | self.counts()

    def begin(self):
        "In the training thread, before the epoch's first batch is asked for. After the warm-up, waits for the driver's word"
        self.wait()
        if self.epoch >= self.cfg.warm:
            self.tell(ready=True)
            if not sys.stdin.readline(): sys.exit()
        self.at = self.now()

    def step(self):
        "After each step, until the first one is timed"
        if self.first_s is not None: return
        self.steps += 1
        if self.steps < self.first: return
        self.wait()
        self.first_s = time.perf_counter()-self.start

    def end(self, n): # `n` steps were made
        "In the training thread, at the end of the epoch's training"
        self.wait()
        now = self.now()
        diff = {k: v-self.at[k] for k,v in now.items()}
        for k,v in diff.items(): self.total[k] = self.total.get(k, 0)+v
        late = diff.pop('compiles', None)
        diff.pop('compile_s', None)
        if self.epoch >= self.cfg.warm:
            self.tell(row={k: v/n for k,v in diff.items()} | dict(late_compiles=late, steps=n, first_s=self.first_s, rss_mb=rss_mb(),
                **{k: self.total.get(k) for k in ('compiles', 'compile_s')},
                peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**10))
        self.epoch += 1

    @property
    def epochs(self): return self.cfg.warm+self.cfg.rounds
