#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plans and loads against the programs that read and write them.

Of SGLang and vllm-ascend the very functions that read a plan run here, out of the packages that scripts/peers
installs; the rest of these programs needs GPUs and is not loaded. vLLM's loader is in no release yet and TensorRT-LLM
has no package for processors only: for them the published rules are checked (docs/formats/plan.md).

Usage: peers_test.py BIN MPIRUN
"""

import ast
import contextlib
import importlib.util
import json
import pathlib
import random
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "cli" / "moe"))
from command import CLUSTER, EXPERTS, LAYERS, Case, jsonl, main, trace  # noqa: E402

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from pydantic import BaseModel, ConfigDict  # noqa: E402

RANKS, PER_RANK = 8, 4


def folder_of(package):
    """The folder of a package that is not imported; None if it is not installed."""
    found = importlib.util.find_spec(package)
    return found and pathlib.Path(found.submodule_search_locations[0])


# Looked up before stand-ins take these names.
FOLDERS = {package: folder_of(package) for package in ("sglang", "vllm_ascend")}


def functions(path, names, **known):
    """Functions of a file, by name, in a namespace with their dependencies."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in nodes} == set(names), f"{path} has no {names}"
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + nodes, []), str(path), "exec"), known)  # pylint: disable=exec-used
    return [known[name] for name in names]


def module_of(path, name, **stubs):
    """A module of its file, with stand-ins for its imports from its program: members by name of the module,
    "__" for a dot."""
    for stub, content in stubs.items():
        full = stub.replace("__", ".")
        parts = full.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for key, value in content.items():
            setattr(sys.modules[full], key, value)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def as_published():
    """SGLang's copy of the balancer with the published order and arithmetic: equal items keep their order, where torch
    by default orders them as the processor's vectors happen to; and weights are added in 32 bits, not in 64."""
    sort, tolist = torch.Tensor.sort, torch.Tensor.tolist
    torch.Tensor.sort = lambda self, dim=-1, descending=False: sort(self, dim=dim, descending=descending, stable=True)
    torch.Tensor.tolist = lambda self: list(map(list, self.numpy())) if self.is_floating_point() else tolist(self)
    try:
        yield
    finally:
        torch.Tensor.sort, torch.Tensor.tolist = sort, tolist


def rows_of(plan):
    """Slots of our record, rank after rank."""
    return [[expert for gpu in layer["devices"] for expert in gpu] for layer in plan["layers"]]


class Peers(Case):
    def written(self, form, name, *words):
        """A plan in a peer's format, and its slots as this project records them."""
        words = words or ("--strategy", "eplb+")
        self.plan(*words, "-o", "ours.json", "--force")
        self.plan(*words, "--format", form, "-o", name, "--force")
        return self.work / name, rows_of(self.read("ours.json"))

    def file_of(self, package, path):
        if FOLDERS[package] is None:
            self.skipTest(f"{package} is not installed (scripts/peers)")
        return FOLDERS[package] / path


    def oddities(self):
        """A recording with a dense layer and an idle last step, and a cluster with a dead GPU."""
        records = [[[0] * EXPERTS if layer == 0 else row for layer, row in enumerate(record)] for record in trace()]
        self.write("odd.json", [*records, [[0] * EXPERTS] * LAYERS])
        self.write("dead.json", {"nodes": [{"gpus": [PER_RANK, {"slots": PER_RANK, "alive": node != 2}]}
                                           for node in range(4)]})

    def odd(self, form, name, *cluster):
        """A plan for that recording, and its slots as our record has them."""
        cluster = cluster or CLUSTER
        done = self.run_in("odd.json", *cluster, "--window", "all", "-o", "ours.json", "--force")
        self.assertIn("1 of 5 records have no tokens and are ignored", done.stdout + done.stderr)
        self.run_in("odd.json", *cluster, "--window", "all", "-o", name, "--format", form, "--force")
        return self.work / name, rows_of(self.read("ours.json"))


class Sglang(Peers):
    def locations(self, path, algorithm="none"):
        moe = types.SimpleNamespace(
            init_expert_location=str(path), ep_num_redundant_experts=RANKS * PER_RANK - EXPERTS,
            moe_a2a_backend="none", ep_dispatch_algorithm="static", ep_join_mode=None, eplb_algorithm=algorithm)
        parallel = types.SimpleNamespace(ep_size=RANKS, nnodes=4, elastic_ep_initial_size=None)
        module = module_of(
            self.file_of("sglang", "srt/eplb/expert_location.py"), "sglang_expert_location",
            sglang__srt__elastic_ep__elastic_ep={"elastic_expanded_world_enabled": lambda: False},
            sglang__srt__runtime_context={
                "get_device": lambda: types.SimpleNamespace(device="cpu"), "get_parallel": lambda: parallel,
                "get_exec": lambda: types.SimpleNamespace(moe=moe), "get_resources": lambda: None})
        module.ModelConfigForExpertLocation.from_model_config = staticmethod(
            lambda config: module.ModelConfigForExpertLocation(LAYERS, EXPERTS, 1))
        return [module.compute_initial_expert_location_metadata(None, rank) for rank in range(RANKS)]

    def test_it_starts_from_our_map(self):
        for strategy in ("best", "eplb+", "lazarus"):
            path, rows = self.written("sglang", "s.json", "--strategy", strategy)
            for metadata in self.locations(path):
                self.assertEqual(metadata.physical_to_logical_map.tolist(), rows)
                self.assertEqual((metadata.num_local_physical_experts, metadata.num_logical_experts),
                                 (PER_RANK, EXPERTS))
                self.assertTrue((metadata.logical_to_all_physical_map_num_valid > 0).all())
                for layer, row in enumerate(rows):
                    for expert in range(EXPERTS):
                        held = metadata.logical_to_all_physical_map[layer, expert]
                        self.assertEqual([slot for slot in held.tolist() if slot >= 0],
                                         [slot for slot, e in enumerate(row) if e == expert])

    def test_dense_layers_idle_steps_and_dead_gpus(self):
        self.oddities()
        path, rows = self.odd("sglang", "s.json")
        for metadata in self.locations(path):
            self.assertEqual(metadata.physical_to_logical_map.tolist(), rows)
        self.run_in("odd.json", "--cluster", "dead.json", "--window", "all", "-o", "d.json", "--format", "sglang")
        dead = 5
        for metadata in self.locations(self.work / "d.json"):
            slots = metadata.physical_to_logical_map
            self.assertEqual(slots[:, dead * PER_RANK:(dead + 1) * PER_RANK].unique().tolist(), [0])
            self.assertTrue((metadata.logical_to_all_physical_map_num_valid > 0).all())
            # Without that rank every expert is still there.
            alive = torch.cat([slots[:, :dead * PER_RANK], slots[:, (dead + 1) * PER_RANK:]], 1)
            for row in alive.tolist():
                self.assertEqual(set(row), set(range(EXPERTS)))

    def test_we_read_what_its_recorder_dumps(self):
        path = self.file_of("sglang", "srt/eplb/expert_distribution.py")
        folder = types.SimpleNamespace(SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=types.SimpleNamespace(
            get=lambda: str(self.work / "dumps")))
        logical, dump = functions(
            path, ("_convert_global_physical_count_to_logical_count", "_dump_to_file"), torch=torch, envs=folder,
            Path=pathlib.Path, logger=types.SimpleNamespace(info=lambda *_: None))
        torch.manual_seed(3)
        physical = torch.randint(0, 5000, (5, LAYERS, EXPERTS + 8), dtype=torch.int32)
        physical[4] = 0  # its ring has rows that no pass has filled
        maps = torch.stack([torch.cat([torch.arange(EXPERTS), torch.randperm(EXPERTS)[:8]]) for _ in range(LAYERS)])
        counts = logical(physical, num_layers=LAYERS, num_logical_experts=EXPERTS, physical_to_logical_map=maps)
        dump("recorder.pt", {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None})
        for step in range(4):
            self.run_in("dumps/recorder.pt", *CLUSTER, "--at", step, "--window", 1, "--strategy", "eplb", "-o", "p.json",
                        "--force")
            self.assertEqual([layer["loads"] for layer in self.read("p.json")["layers"]], counts[step].tolist())
        self.run_in("dumps/recorder.pt", *CLUSTER, "--strategy", "eplb", "-o", "p.json", "--force")
        self.assertEqual([layer["loads"] for layer in self.read("p.json")["layers"]], counts.sum(0).tolist(),
                         "the whole recording, unless a window is given")

    def test_the_published_balancer_gives_the_same_maps(self):
        path = self.file_of("sglang", "srt/eplb/eplb_algorithms/deepseek.py")
        theirs = module_of(path, "sglang_deepseek").rebalance_experts
        dice = random.Random(5)
        for case in range(40):
            nodes, gpus = dice.choice([(1, 4), (2, 2), (2, 4), (4, 2), (4, 8)])
            groups = dice.choice([1, nodes, 2 * nodes])
            experts = groups * dice.choice([2, 3, 4]) * nodes
            slots = max(1, -(-experts // (nodes * gpus))) + dice.randrange(3)
            top = dice.choice([3, 100, 1_000_000])  # few values make ties
            loads = [[dice.randrange(top) for _ in range(experts)] for _ in range(3)]
            self.write("l.json", loads)
            for policy in ("global", "hierarchical") if groups % nodes == 0 else ("global",):
                with self.subTest(case=case, policy=policy):
                    self.run_in("l.json", "--nodes", nodes, "--gpus", gpus, "--slots", slots, "--groups", groups,
                                "--strategy", "eplb", "--policy", policy, "--format", "eplb", "-o", "e.json",
                                "--force")
                    ours = self.read("e.json")
                    with as_published():
                        phy2log, log2phy, counts = theirs(torch.tensor(loads), slots * nodes * gpus, groups, nodes,
                                                          nodes * gpus, policy == "hierarchical")
                    self.assertEqual(ours["physical_to_logical"], phy2log.tolist())
                    self.assertEqual(ours["logical_count"], counts.tolist())
                    # The same slots; no rule decides which replica is named first.
                    self.assertEqual([[sorted(row) for row in layer] for layer in ours["logical_to_physical"]],
                                     [[sorted(row) for row in layer] for layer in log2phy.tolist()])


class Ascend(Peers):
    def test_dense_layers_idle_steps_and_dead_gpus(self):
        path = self.file_of("vllm_ascend", "eplb/core/eplb_utils.py")
        (read,) = functions(path, ("expert_file_to_tensor",), json=json, torch=torch)
        self.oddities()
        name, rows = self.odd("vllm-ascend", "a.json")
        for layer, row in enumerate(rows):
            placement, slots = read(str(name), layer)
            self.assertEqual(placement.tolist(), [row[r * PER_RANK:(r + 1) * PER_RANK] for r in range(RANKS)])
            self.assertEqual(slots, RANKS * PER_RANK)
        self.refused(9, "only --format sglang and plan can express", "odd.json", "--cluster", "dead.json",
                     "-o", "q", "--format", "vllm-ascend")

    def test_it_reads_our_map(self):
        path = self.file_of("vllm_ascend", "eplb/core/eplb_utils.py")
        (read,) = functions(path, ("expert_file_to_tensor",), json=json, torch=torch)
        name, rows = self.written("vllm-ascend", "a.json")
        for layer, row in enumerate(rows):
            placement, slots = read(str(name), layer)
            self.assertEqual(placement.tolist(), [row[r * PER_RANK:(r + 1) * PER_RANK] for r in range(RANKS)])
            self.assertEqual(slots, RANKS * PER_RANK)

    def test_we_read_what_it_records(self):
        path = self.file_of("vllm_ascend", "eplb/adaptor/vllm_adaptor.py")
        (record,) = functions(path, ("_export_tensor_to_file",), json=json, torch=torch)
        maps = torch.full((LAYERS, RANKS, EXPERTS), -1)
        rows = []
        for layer in range(LAYERS):
            slots = [*random.Random(layer).sample(range(EXPERTS), EXPERTS), *range(EXPERTS)]
            for rank in range(RANKS):
                for place, expert in enumerate(slots[rank * PER_RANK:(rank + 1) * PER_RANK]):
                    maps[layer, rank, expert] = place
            rows.append(slots)
        record(types.SimpleNamespace(rank_id=0), maps, str(self.work / "record.json"))
        theirs = self.result("evaluate", "record.json", "loads.jsonl", *CLUSTER)["plan"]["metrics"]
        self.write("rows.json", rows)
        self.assertEqual(theirs, self.result("evaluate", "rows.json", "loads.jsonl", *CLUSTER)["plan"]["metrics"])


class Published(Peers):
    def test_dense_layers_idle_steps_and_dead_gpus(self):
        self.oddities()
        path, rows = self.odd("vllm", "v.jsonl")
        (record,) = [line for line in map(json.loads, path.read_text().splitlines())
                     if line["record_type"] == "eplb_initial_mapping"]
        layers = record["initial_global_assignments"]
        self.assertEqual([layers[str(layer)] for layer in range(LAYERS)], rows)
        path, rows = self.odd("tensorrt-llm", "t.yaml")
        layers = yaml.safe_load(path.read_text())["initial_global_assignments"]
        self.assertEqual(layers, dict(enumerate(rows)))
        for row in rows:
            self.assertEqual(set(row), set(range(EXPERTS)))
        path, rows = self.odd("eplb", "e.json")
        plan = json.loads(path.read_text())
        self.assertEqual(plan["physical_to_logical"], rows)
        for layer, row in enumerate(rows):
            self.assertEqual(plan["logical_count"][layer], [row.count(expert) for expert in range(EXPERTS)])
            for expert, slots in enumerate(plan["logical_to_physical"][layer]):
                self.assertEqual([slot for slot in slots if slot >= 0],
                                 [slot for slot, e in enumerate(row) if e == expert])
        for form in ("vllm", "tensorrt-llm", "eplb"):
            self.refused(9, "only --format sglang and plan can express", "odd.json", "--cluster", "dead.json",
                         "-o", "q", "--format", form)

    def test_vllm(self):
        """The rules of the loader that is under review: one record, dense layers, every expert, whole ranks."""
        path, rows = self.written("vllm", "v.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        (record,) = [line for line in lines if line["record_type"] == "eplb_initial_mapping"]
        self.assertEqual((record["version"], record["num_slots"]), (1, RANKS * PER_RANK))
        self.assertEqual(record["num_redundant_experts"], RANKS * PER_RANK - EXPERTS)
        layers = record["initial_global_assignments"]
        self.assertEqual([layers[str(layer)] for layer in range(LAYERS)], rows)
        self.assertEqual(len(layers), LAYERS)

    def test_tensorrt_llm(self):
        """The fields of its MoeLoadBalancerConfig, which refuses all others; keys are numbers of YAML."""
        class Balancer(BaseModel):
            model_config = ConfigDict(extra="forbid", strict=True)
            num_slots: int
            initial_global_assignments: dict[int, list[int]]
            layer_updates_per_iter: int

        path, rows = self.written("tensorrt-llm", "t.yaml")
        config = Balancer(**yaml.safe_load(path.read_text()))
        self.assertEqual((config.num_slots, config.layer_updates_per_iter), (RANKS * PER_RANK, 0))
        self.assertEqual(config.initial_global_assignments, dict(enumerate(rows)))
        self.assertEqual(config.num_slots % RANKS, 0)
        # As its own tool writes it.
        (self.work / "theirs.yaml").write_text(yaml.dump(config.model_dump(), default_flow_style=None))
        self.assertEqual(self.result("evaluate", "theirs.yaml", "loads.jsonl", *CLUSTER)["plan"]["metrics"],
                         self.result("evaluate", "ours.json", "loads.jsonl", *CLUSTER)["plan"]["metrics"])

    def test_statistics_of_tensorrt_llm(self):
        folder = self.work / "statistics"
        folder.mkdir()
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS, "num_experts_per_token": 2}))
        records = trace(records=2)
        for rank in range(2):
            # Counts of a rank are 32-bit tensors, a file each.
            safetensors.torch.save_file(
                {f"{50 + step}_{layer}": torch.tensor(counts, dtype=torch.int32) // 2 * (2 - rank)
                 for step, record in enumerate(records) for layer, counts in enumerate(record)},
                folder / f"rank{rank}.safetensors")
        self.run_in("statistics", *CLUSTER, "--at", "50", "--strategy", "eplb", "-o", "p.json")
        self.assertEqual([layer["loads"] for layer in self.read("p.json")["layers"]],
                         [[count // 2 * 3 for count in counts] for counts in records[0]])

    def test_counters_that_torch_saves(self):
        class Router(torch.nn.Module):
            def __init__(self, counts):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(2, 2))
                self.register_buffer("local_tokens_per_expert", torch.tensor(counts, dtype=torch.float32))

        records = trace(records=1)[0]
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Router(counts) for counts in records)})
        folder = self.work / "ckpt" / "global_step7"
        folder.mkdir(parents=True)
        (self.work / "ckpt" / "latest").write_text("global_step7")
        torch.save({"module": model.state_dict(), "global_steps": 7}, folder / "mp_rank_00_model_states.pt")
        self.run_in("ckpt", *CLUSTER, "--strategy", "eplb", "-o", "p.json")
        plan = self.read("p.json")
        self.assertEqual([layer["loads"] for layer in plan["layers"]], records)
        self.assertEqual(plan["iteration"], 7)


class Vllm(Peers):
    def test_we_read_what_it_dumps(self):
        """Its record of physical experts with their map, as its collector writes them."""
        records = trace(records=3)
        lines = [{"record_type": "eplb_load_meta", "version": 1, "model": "m", "num_ranks": 2, "num_groups": 1,
                  "num_nodes": 1, "num_layers": LAYERS, "num_redundant_experts": 0}]
        for step, record in enumerate(records):
            lines.append({"record_type": "eplb_load_stats", "version": 1, "step": step + 1, "num_ranks": 2,
                          "expert_load": record, "p2l_map": [list(range(EXPERTS))] * LAYERS})
        self.write("v.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        self.write("o.jsonl", jsonl(records))
        for name in ("v", "o"):
            self.run_in(f"{name}.jsonl", *CLUSTER, "--window", "3", "-o", name)
        self.assertEqual(self.read("v")["layers"], self.read("o")["layers"])


if __name__ == "__main__":
    main(__name__)
