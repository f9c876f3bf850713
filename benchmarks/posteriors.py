"""Time and memory of KFAC Laplace and of the closed-form head on the paper's UCI network, on the CPU.

    python benchmarks/posteriors.py

The network is d-1000-1000-500-25-2000-1 with 500 training rows; predictions are for 100 rows. Figures to compare with,
measured for laplace-torch 0.3 on such a machine: fit 8.4 s, GLM prediction 50.7 s, 2.6 GB.
"""

import json
import resource
import time

import torch

from bochner import Gaussian, Model, StationaryLayer
from bochner.experiments.rows import provenance
from bochner.networks import mlp
from bochner.posteriors.closed_form import ClosedForm
from bochner.posteriors.laplace import Laplace


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(25, 2000, kernel="matern32", lengthscale=0.2, generator=generator)
    model = Model(layer, 1, Gaussian(0.3), extractor=mlp(12, generator=generator), generator=generator)
    x, y = torch.randn(500, 12, generator=generator), torch.randn(500, 1, generator=generator)
    x_new = torch.randn(100, 12, generator=generator)
    times = {}

    def timed(name: str, work):
        start = time.perf_counter()
        result = work()
        times[name] = round(time.perf_counter() - start, 3)
        times[f"{name}_peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
        return result

    closed = timed("closed_form_fit_s", lambda: ClosedForm(model, x, y))
    timed("closed_form_predict_s", lambda: closed.predict(x_new))
    laplace = timed("kfac_fit_s", lambda: Laplace(model, x, y))
    timed("kfac_glm_predict_s", lambda: laplace.predict(x_new))
    timed("kfac_50_samples_s", lambda: laplace.predict_samples(x_new, 50, group=5, generator=generator))
    print(json.dumps({"benchmark": "posteriors", **times, **provenance()}))


if __name__ == "__main__":
    main()
