r"""Laplace posteriors over the weights: Kronecker-factored, diagonal, full, or the last layer alone.

Around the MAP estimate the precision is the generalised Gauss–Newton matrix of the whole training set plus the prior's:
$H = \sum_n J_n^\top \Lambda_n J_n + \tau$. For a layer $z = W\bar a$ ($\bar a$ carries a 1 for the bias) KFAC takes

$$ \sum_n J_n^\top\Lambda_n J_n \approx A \otimes B, \qquad A = \tfrac{1}{NT}\sum_{n,t} \bar a \bar a^\top, \qquad
   B = \sum_{n,t,c} g_c g_c^\top, $$

with $g_c$ the gradient of output $c$, weighted by a root of $\Lambda_n$, in $z$, and $T$ the positions that share the weights.
In the eigenbases of A and B, in units of the prior's standard deviations, the prior is added exactly: the precision of entry
(i, j) is $b_i a_j + 1$. For the two likelihoods here the Gauss–Newton matrix is the Fisher information.

The linearised prediction $f(x) + J(x)(\theta - \theta^*)$ has variance $\sum_{ij} (U_B^\top G U_A)_{ij}^2 / (b_i a_j + \tau)$ for
each layer, where $G = \sum_t g_t \bar a_t^\top$. For a linear layer that is $\tilde g^2 \cdot M \cdot \tilde a^2$: two matrix
products and no Jacobian. A convolution sums over its positions, so that $G$ is formed there, for one layer and one chunk at a time.

The lengthscale and the noise stay outside: they are point estimates here.

The prior that a network was trained with is often far too wide for its weights: linearised predictions then are too unsure.
``tune_prior`` multiplies the precision of all weights, or that of each layer, by a factor m that suits held-out rows; or, without
any, by the one with the largest marginal likelihood,

$$ \log p(y) \approx \log p(y \mid \theta^*) - \tfrac12 \sum_l m_l \|\theta^*_l\|^2_{\tau_l}
   - \tfrac12 \log |H| + \tfrac12 \log |m\tau| , $$

which is exact for a linear network with Gaussian noise. Eigenbases do not depend on m, so trying another one costs one prediction,
or none. For classes held-out rows also choose a temperature of at least 1, by which the outputs of every draw are divided; a
smaller one would make the network surer everywhere, and so where it has seen nothing.

A list of networks of one shape is treated as one stack: every array then has a leading dimension E, and nothing loops over
the members.
"""

from bochner.posteriors.laplace.posterior import Laplace

__all__ = ["Laplace"]
