# SPDX-License-Identifier: Apache-2.0
"""A trainer with replicated experts: two MoE layers, top-2 gates, experts as MLPs, AdamW. Experts are placed by a plan
of moe-replace, the plan changes in the middle, and a rank that is killed costs nothing but its hardware: the others
continue from replicas. A dense model on one rank, with the same data, gives the expected results.

All is float64, so that a difference is an error and not rounding.
"""

import datetime
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import rank_process
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

HIDDEN, INNER, EXPERTS, CHOICES, LAYERS, BATCH = 12, 20, 8, 2, 2, 60
RATE = 1e-3
PATIENCE = 30  # seconds until a rank ends a collective after its peers have left it for a dead one


def random(name, *shape):
    """The same numbers at every call."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expert_of(layer, expert):
    return [torch.nn.Parameter(random(f"{layer} {expert} in", HIDDEN, INNER) / 4),
            torch.nn.Parameter(random(f"{layer} {expert} out", INNER, HIDDEN) / 4)]


def dense_parameters():
    gates = [torch.nn.Parameter(random(f"gate {layer}", HIDDEN, EXPERTS)) for layer in range(LAYERS)]
    return [*gates, torch.nn.Parameter(random("head", HIDDEN, 1))]


def batch(step):
    """Tokens of the whole batch and the expected outputs; some experts are hotter than others, and others later."""
    tokens = random(f"tokens {step}", BATCH, HIDDEN) + random(f"drift {step // 4}", 1, HIDDEN)
    return tokens, random(f"wanted {step}", BATCH, 1)


def gated(tokens, gate):
    """(experts, weights) of each token."""
    weights, chosen = (tokens @ gate).softmax(-1).topk(CHOICES, -1)
    return chosen, weights / weights.sum(-1, keepdim=True)


def computed(tokens, parameters):
    return gelu(tokens @ parameters[0]) @ parameters[1]


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)


class Dense:
    """One rank, every expert: the expected results."""

    def __init__(self):
        self.dense = dense_parameters()
        self.experts = {(layer, expert): expert_of(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
        self.optimizer = optimizer_of(self.dense + [one for pair in self.experts.values() for one in pair])

    def step(self, number):
        tokens, wanted = batch(number)
        for layer in range(LAYERS):
            chosen, weights = gated(tokens, self.dense[layer])
            outputs = torch.stack([computed(tokens, self.experts[layer, expert]) for expert in range(EXPERTS)], 1)
            picked = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, HIDDEN))
            tokens = tokens + (weights.unsqueeze(-1) * picked).sum(1)
        loss = ((tokens @ self.dense[-1] - wanted) ** 2).sum() / BATCH
        self.optimizer.zero_grad()
        loss.backward()
        for one in self.experts.values():  # as a replica with tokens elsewhere
            for parameter in one:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.optimizer.step()
        return loss.item()


class Sharded:
    """One rank of several."""

    def __init__(self, plan, rule, rematerialise):
        self.rule, self.rematerialise, self.done, self.loss = rule, rematerialise, 0, None
        self.dense = dense_parameters()
        self.layers = []
        self.adopt(plan, {key: (expert_of(*key), None) for key in mine(plan)})

    def adopt(self, plan, experts):
        """{(layer, expert): (parameters, state of AdamW of each)}. Collective."""
        import shardwright
        for layer in self.layers:
            layer.close()
        states = {one: self.optimizer.state[one] for one in self.dense} if self.layers else {}
        self.plan, self.experts = plan, {key: parameters for key, (parameters, _) in experts.items()}
        self.layers = [shardwright.ReplicatedExperts(
            plan, layer, {expert: one for (at, expert), one in self.experts.items() if at == layer}, rule=self.rule,
            rematerialise=self.rematerialise) for layer in range(LAYERS)]
        self.optimizer = optimizer_of(self.dense + [one for pair in self.experts.values() for one in pair])
        self.optimizer.state.update(states)
        for parameters, kept in experts.values():
            if kept is not None:
                self.optimizer.state.update(zip(parameters, kept))

    def state(self):
        """{(layer, expert): all its tensors}, in one order."""
        found = {}
        for key, parameters in self.experts.items():
            found[key] = [one.detach() for one in parameters]
            found[key] += [self.optimizer.state[one][name] for one in parameters for name in ("step", "exp_avg", "exp_avg_sq")]
        return found

    def migrate(self, plan):
        """Collective. To a new plan; every expert's state is bit for bit what it was."""
        import shardwright
        before = self.state()
        after = shardwright.migrate(self.plan, plan, before)
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (digests(before), digests(after)))
        was = {key: digest for old, _ in told for key, digest in old.items()}
        for _, new in told:
            for key, digest in new.items():
                assert digest == was[key], key
        assert sorted(after) == mine(plan)
        names = ("step", "exp_avg", "exp_avg_sq")
        self.adopt(plan, {key: ([torch.nn.Parameter(one) for one in tensors[:2]],
                                [dict(zip(names, tensors[i:i + 3])) for i in (2, 5)]) for key, tensors in after.items()})
        return sum(len(set(new) - set(old)) for old, new in told)

    def step(self, number, hook=lambda where: None):
        tokens, wanted = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch(number))
        fetched = [layer.prefetch() for layer in self.layers] if self.plan.owners else []
        for number_of_layer, layer in enumerate(self.layers):
            parameters = layer.parameters
            if self.plan.owners:
                tokens, parameters = layer.materialise(tokens, fetched[number_of_layer])
            chosen, weights = gated(tokens, self.dense[number_of_layer])
            sent = layer.dispatch(tokens, chosen)
            hook("forward")
            rows = torch.cat([computed(rows, parameters[expert]) for expert, rows in sent.by_expert()])
            tokens = tokens + layer.combine(rows, sent, weights)
        loss = ((tokens @ self.dense[-1] - wanted) ** 2).sum() / BATCH
        self.optimizer.zero_grad()
        loss.backward()
        hook("backward")
        if not self.plan.owners:
            for layer in self.layers:
                layer.sum_gradients()
        summed = torch.cat([loss.detach().reshape(1), *(one.grad.reshape(-1) for one in self.dense)])
        dist.all_reduce(summed)
        for one, whole in zip(self.dense, summed[1:].split([one.numel() for one in self.dense])):
            one.grad = whole.view_as(one).clone()
        self.loss = summed[0].item()
        # After this every rank has all gradients: a rank that continues may step, and one that does not still can.
        dist.barrier()
        hook("committed")
        self.commit()

    def commit(self):
        self.optimizer.step()
        self.done += 1


def mine(plan):
    return sorted((layer, expert) for layer in range(LAYERS) for expert, ranks in enumerate(plan.state(layer))
                  if dist.get_rank() in ranks)


def digests(state):
    return {key: hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest() for key, tensors in state.items()}


def meet(folder, era, number, ranks):
    """All of `ranks` meet, of which this one is number so and so."""
    (folder / f"here{era}.{ranks[number]}").touch()
    for rank in ranks:
        wait_for(folder / f"here{era}.{rank}")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{era}", rank=number, world_size=len(ranks),
                            timeout=datetime.timedelta(seconds=PATIENCE))


def wait_for(path, seconds=3000):
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.02)


def train(rank, folder, command, steps, rule="capacity", change_at=None, kill=None, rematerialise=False):
    """Collective. Trains; returns the final state of rank 0.

    kill: (rank, step, where): when a rank ends by SIGKILL.
    """
    import shardwright
    trainer = Sharded(shardwright.ExpertPlan.read(folder / "plan0.json"), rule, rematerialise)
    losses, moved, era = [], 0, 0

    def hook(where):
        if kill == (rank, trainer.done, where):
            os.kill(os.getpid(), signal.SIGKILL)

    while trainer.done < steps:
        number = trainer.done
        if number == change_at:
            moved, change_at = moved + trainer.migrate(shardwright.ExpertPlan.read(folder / "plan1.json")), None
        try:
            trainer.step(number, hook)
        except RuntimeError as error:  # shardwright.Error is one
            if kill is None or isinstance(error, shardwright.Error) and error.code != 7:
                raise
            moved, era, kill = moved + recover(trainer, rank, folder, command, era + 1), era + 1, None
        if trainer.done > number:
            losses.append(trainer.loss)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (digests(trainer.state()), {key: [one.detach() for one in pair] for key, pair in trainer.experts.items()}))
    replicas = {}
    for state, _ in told:
        for key, digest in state.items():
            replicas.setdefault(key, []).append(digest)
    assert all(len(set(of)) == 1 for of in replicas.values()), "replicas differ"
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "moved": moved, "dense": [one.detach() for one in trainer.dense],
                    "replicated": sum(len(of) > 1 for of in replicas.values()), "ranks": dist.get_world_size(),
                    "experts": {key: pair for _, parts in told for key, pair in parts.items()}}, folder / "result.pt")


def recover(trainer, rank, folder, command, era):
    """The ranks that are left meet again, agree on the step that was made last, and continue by a plan without the dead
    one."""
    import shardwright
    dist.destroy_process_group()
    wait_for(folder / f"alive{era}.json")
    alive = json.loads((folder / f"alive{era}.json").read_text())
    meet(folder, era, alive.index(rank), alive)
    done = [None] * len(alive)
    dist.all_gather_object(done, trainer.done)
    if trainer.done < max(done):
        trainer.commit()
    if dist.get_rank() == 0:
        cluster = json.loads((folder / "cluster.json").read_text())
        for number, node in enumerate(cluster["nodes"]):
            node["alive"] = number in alive
        (folder / f"cluster{era}.json").write_text(json.dumps(cluster))
        subprocess.run([command, folder / "loads.jsonl", "--cluster", folder / f"cluster{era}.json", "--old", trainer.plan.path,
                        "--strategy", "lazarus", "--faults", "1", "-o", folder / f"recovery{era}.json", "-q"],
                       stdout=subprocess.DEVNULL, check=True)
    dist.barrier()
    return trainer.migrate(shardwright.ExpertPlan.read(folder / f"recovery{era}.json"))


def as_rank(rank, ranks, folder, function, arguments):
    torch.set_num_threads(1)
    meet(folder, 0, rank, range(ranks))
    function(rank, folder, *arguments)
    dist.barrier()


def launch(ranks, folder, function, *arguments, may_die=0, seconds=3000):
    """Runs function(rank, folder, ...) on ranks that are forks of this process, which must not have used autograd yet. The
    launcher of a job: it reports the remaining ranks when a rank was killed."""
    folder = pathlib.Path(folder)
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            rank_process.become(folder / f"log{rank}", lambda: as_rank(rank, ranks, folder, function, arguments))
        pids[pid] = rank
    alive, era, failed = set(range(ranks)), 0, []
    end = time.monotonic() + seconds
    while pids and time.monotonic() < end and not failed:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            rank, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL and may_die > 0:
                may_die, era = may_die - 1, era + 1
                alive.discard(rank)
                (folder / "alive").write_text(json.dumps(sorted(alive)))
                os.rename(folder / "alive", folder / f"alive{era}.json")
            elif code != 0:
                failed.append((rank, code))
        time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # prints its stack
    time.sleep(1 if pids else 0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if failed or pids:
        logs = "\n".join(f"rank {rank}:\n{(folder / f'log{rank}').read_text()[-3000:]}" for rank in range(ranks))
        raise AssertionError(f"failed: {failed}, not done: {sorted(pids.values())}\n{logs}")
