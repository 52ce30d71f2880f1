"""Levels on several devices: lanes that share a batch, and devices that share a layer."""

import numpy as np
import pytest

from jaxinfer.elastic import Service
from jaxinfer.sharding import MeshConfig
from tests.elastic.vits import QUICK, SIZE, TOLERANCE, stripes


def test_answers_are_those_of_one_device(service, vit, registered, options):
    """Neither the 2 heads nor the MLP of 32 divide by 3."""
    images = stripes(5, seed=3).images
    expected = [answer.probabilities for answer in service.classify(images, "stripes", -4)]
    mesh = MeshConfig(data=2, tensor=3)
    with Service.from_checkpoint(vit, repository=registered, mesh=mesh, **options) as divided:
        assert divided.batch_sizes == (2, 4)
        answers = divided.classify(images, "stripes", -4)
        sizes = {tenant: size for (_, tenant), size in divided._catalogue.reservation.sizes.items()}
        assert sizes["images"] == 6 * 2 * (4 // 2) * 3 * SIZE**2  # of 6 devices, which a CPU has one memory for
    np.testing.assert_allclose([x.probabilities for x in answers], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_tasks_are_learnt_and_queries_answered(vit, tmp_path, options):
    with Service.from_checkpoint(vit, repository=tmp_path, mesh=MeshConfig(data=2, tensor=2), **options) as service:
        service.register_task("stripes", stripes(), prompts=[2], training=QUICK)
        service.measure_latency()
        asked = stripes(20, seed=9)
        futures = [service.submit(image, "stripes", deadline=600.0) for image in asked.images]
        answers = [future.result().label for future in futures]
    right = np.mean([label == asked.names[i] for label, i in zip(answers, asked.labels, strict=True)])
    assert right > 0.85
