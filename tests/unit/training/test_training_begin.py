"""A run that begins with an exported model begins with its answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training alone needs PyTorch")
ROOT = Path(__file__).parents[3]


def test_the_weights_of_the_shipped_model_give_its_answers_in_training_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    from lane_training.export import infer, load_exported, session
    from lane_training.labels import MaterialError
    from lane_training.network import LaneNetwork
    from lane_training.samples import as_array, rendered_set
    from lane_training.trainer import settle

    shipped = ROOT / "models" / "laneDetect_model" / "1" / "model.onnx"
    images = as_array(rendered_set(8, 5))
    expected = np.stack([infer(session(shipped, 1), bgr) for bgr in images])
    tensor = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float() / 255.0
    network = LaneNetwork()
    norms = load_exported(network, shipped)
    near = np.abs(expected) < 1280
    with torch.no_grad():
        begun = network.eval()(tensor).numpy()
        settle(network, norms, tensor)
        settled = network.eval()(tensor).numpy()
        for answered in (begun, settled):
            np.testing.assert_allclose(answered[near], expected[near], atol=2e-2)
        answered = network.train()(tensor).numpy()
    np.testing.assert_allclose(answered[..., :2], expected[..., :2], atol=5e-2)

    other = tmp_path / "other.onnx"
    import onnx

    model = onnx.load(str(shipped))
    del model.graph.initializer[:3]
    onnx.save(model, str(other))
    with pytest.raises(MaterialError, match="is no network that this script exported"):
        load_exported(LaneNetwork(), other)


def test_late_layers_learn_alone_and_begin_with_the_shipped_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    from lane_training.trainer import Plan, Training

    shipped = ROOT / "models" / "laneDetect_model" / "1" / "model.onnx"
    plan = Plan(1.0, 2, 2, 1e-3, 1, tmp_path / "run.pt", None, begin_with=shipped, late_layers=True)
    training = Training(plan)
    before = {name: each.clone() for name, each in training.state()["network"].items()}

    class Ring:
        def batch(self, size: int) -> tuple[object, object]:
            from lane_training.loss import Targets

            lanes = torch.full((size, 5, 72), float("nan"))
            lanes[:, 0, :50] = 300.0
            own = torch.zeros(size, dtype=torch.bool)
            images = torch.rand(size, 3, 360, 640).to(torch.bfloat16)
            vanishing = torch.full((size, 2), float("nan"))
            return images, Targets(lanes, torch.ones(size, 5), ~own, own, vanishing)

    training.advance(Ring())
    changed = {n for n, each in training.state()["network"].items() if not each.equal(before[n])}
    assert "row_weights" in changed
    assert "stride_32.3.mix.weight" in changed
    assert not {n for n in changed if n.startswith(("stem", "stride_16"))}
    assert not {n for n in changed if "running_" in n}


def test_an_exported_network_keeps_a_share_of_the_weights_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    import onnx
    from lane_training.export import blend, verify
    from lane_training.samples import as_array, rendered_set

    def weights(path: Path) -> dict[str, np.ndarray]:
        graph = onnx.load(str(path)).graph
        return {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}

    shipped = ROOT / "models" / "laneDetect_model" / "1" / "model.onnx"
    exported = tmp_path / "model.onnx"
    model = onnx.load(str(shipped))
    for tensor in model.graph.initializer:
        if tensor.name.startswith("trunk."):
            learnt = 1.1 * onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(learnt, tensor.name))
    onnx.save(model, str(exported))
    own, begun = weights(exported), weights(shipped)
    network = blend(exported, shipped, 0.25)
    mixed = weights(exported)
    for name, each in begun.items():
        np.testing.assert_allclose(mixed[name], 0.25 * each + 0.75 * own[name], atol=1e-6)
    verify(network, exported, as_array(rendered_set(1, 3)))
