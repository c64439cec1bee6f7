"""Every tuned number of the scheduler: what it does, and how it was found.

The commands run in the repository's root. ``scheduling_grid.py`` compares the scheduler with the
best fixed wait and batch size of 224 loads, so it shows what a change costs. ``simulate`` runs one
load in a second. The yardstick measures real models. Change one number, run its command before and
after, and keep the change only if the difference is beyond the spread of several seeds. What is
"chosen by reasoning" was not searched for: the command beside it only shows that it holds.
"""

from __future__ import annotations

# -- expected arrivals

#: How long callers are watched for after their answers, as a share of the batch's duration.
#: Tuned between 0.1 and 0.5 with ``python benchmarks/scheduling_grid.py --quick``: a lower value
#: misses callers that return slowly, a higher one helps only them.
WATCH_SHARE = 0.35
#: The longest gap between two calls of one burst, as a share of a batch's duration.
#: Tuned with ``python benchmarks/scheduling_grid.py --quick`` (rows "bursts"): a higher value takes
#: a steady stream for a burst.
BURST_SHARE = 0.05
#: A burst has at least this many times the calls that its time would bring anyway.
#: Chosen by reasoning: calls of a stream that happen to be close together are about three times as
#: many as its rate says. Checked with ``service-streamer simulate --base 5ms --rate 500``.
BURST_FACTOR = 4.0
#: Most callers that call again at once have done so after this share of a batch's duration. The
#: engine looks at the time then. Chosen by reasoning: below ``WATCH_SHARE``, and 64 threads take
#: about 1.5 ms. If it is too short, the engine's thread wakes up once more for each batch.
MOST_RETURNED = 0.25
#: While the scheduler waits for callers, it decides again when this share of those who are missing
#: has come. To decide with each of 64 took 0.7 ms of every batch. Chosen by reasoning: the number
#: that is expected is seldom further off. If it is, the wait ends at its time.
SURE = 0.875
#: The share of answered callers that seems to return at once where all calls are independent.
#: Chosen by reasoning, checked with ``pytest tests/test_batching.py -k by_chance``, over loads of
#: 0.5 to 4 calls in the time of one.
CHANCE = 0.3
#: Weight of the newest batch in what is learned about arrivals, lengths and the queue.
#: Tuned with ``python benchmarks/scheduling_grid.py --quick``: high, because load changes within a
#: second.
LEARNING_RATE = 0.25
#: The number of batches over which the rate of arrivals is averaged.
#: Tuned with ``python benchmarks/scheduling_grid.py --quick`` (rows "Poisson").
RATE_BATCHES = 16
#: Fewer expected calls than this are not waited for.
#: Chosen by reasoning: less than half a call is more likely none than one.
LEAST_EXPECTED = 0.5
#: A batch is cut early when this many of its durations are left until a deadline, at first.
#: Chosen by reasoning: what is just in time on average is late half of the time.
URGENCY = 2.0
#: Later it is one duration, and so many times the share by which batches differ from what the line
#: predicts, on average; but never more than at first.
#: Chosen by reasoning: of normal noise that is three standard deviations. Found necessary with
#: ``python -m policies --only goodput gpu``: with twice the duration nothing is ever waited for
#: where the deadline is twice a single run, and all workers begin at once.
MARGIN_FACTOR = 4.0
#: Weight of the newest batch in that share.
#: Chosen by reasoning: low, since a device that changes is no noise.
NOISE_LEARNING_RATE = 0.05
#: And never less than this share of a duration.
#: Chosen by reasoning, and better than none with the same command: to answer takes time, too.
LEAST_MARGIN = 0.1
#: Weight of the newest batch in the time that batches take beside the model, if it took longer.
#: Chosen by reasoning: low, since it may have waited for the batch before.
TRANSIT_RATE = 0.02
#: Batches are cut smaller for deadlines where their items take more than this many times the base.
#: Tuned between 0 and 2 with ``python -m policies --only goodput Poisson``: where the base is most
#: of a batch, a smaller one is hardly sooner back, and the rest pays for another one.
FLAT = 2.0
#: The share of the time until a deadline that a batch may take.
#: Tuned between 0.5 and 1 with ``python -m policies --only goodput minilm-even``: what just missed
#: a batch waits for that one and for its own, but most items wait for a part of one.
DEADLINE_SHARE = 0.6
#: But a batch is no smaller than one that computes this share of the items per second of a batch
#: that takes all of that time.
#: Tuned between 0.8 and 0.9 with the same.
LEAST_SPEED = 0.8
#: The same for a batch that is cut small for its first call while other workers take the rest.
#: Tuned between 0.4 and 0.9 with ``python -m policies --only goodput "Azure, code, gpu, 4, 5.0"``:
#: with more, a call that just missed a batch is late. With less, batches become tiny under load.
LEAST_SPEED_OF_FIRST = 0.4
#: What waits is not cut into small batches, so that the first items are sooner back, if all of it
#: would take more than this share of the time that is left to the next deadline.
#: Tuned between 0.3 and 0.8 with ``python -m policies --only goodput minilm-even``.
TIGHT = 0.4
#: With a deadline of less than so many full batches, none is sent ahead to a busy worker.
#: Chosen by reasoning: what is sent ahead cannot be left out any more when it turns out to be late.
AHEAD_RUNS = 8.0

# -- batches of a model whose cost is unknown

#: Items of the first batch, where items have lengths.
#: Chosen by reasoning: few enough not to take long whatever their lengths are.
FIRST_ITEMS = 8
#: With lengths, a batch costs at most this many times the largest one so far.
#: Chosen by reasoning: doubling reaches any size within a few batches.
GROWTH = 2.0

# -- the line of durations over costs

#: Of lone items in a row, behind which none waits, all batches are learned from up to so many.
#: Chosen by reasoning: as long as the line forgets the half of what it knew.
ALONE_BATCHES = 16
#: Then one of so many, since another one that is like them changes nothing that is decided.
#: Chosen by measurement: with the way past the queue it is a third of what a lone call costs whose
#: model takes no time. When others come, all is learned again.
ALONE_INTERVAL = 8

#: The weight of a batch after one more batch: half after 17.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py``: low enough to follow a throttled
#: device, high enough to tell noise from slope.
FORGETTING = 0.96
#: The weight of the slope known before against the batches, in units of their squared costs.
#: Chosen by reasoning: it decides only while all batches are of one size.
RIDGE = 1e-3
#: The line is more than a guess after this many batches.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py -k line``.
FITTED_BATCHES = 8
#: And if the variance of their costs is at least this share of the squared mean.
#: Chosen by reasoning: a tenth of a standard deviation.
LEAST_SPREAD = 0.01
#: And if the line explains this share of the variance of the durations.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py -k noisy``: of a few batches, noise
#: explains up to a half.
EXPLAINED = 0.5
#: A batch counts as if it took at least this share of the duration that the line predicts.
#: Chosen by reasoning: a batch without work then weighs as much as 16 usual ones, not as all.
LEAST_DURATION = 0.25
#: The first batches are forgotten when a later one takes this many times what they predict.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py -k odd``: a server asks a
#: model about itself first, which takes no time.
NO_WORK = 16.0

#: The same for what padding costs.
#: Found with ``make yardstick ARGS='--only infilling'``: the sizes and costs of batches differ
#: little, so that it takes many to tell what is due to which.
PADDING_FORGETTING = 0.99
#: What each item costs is fitted if the variance of sizes, of batches of the same cost, is at least
#: this share of the squared mean.
#: Found with ``make yardstick ARGS='--only infilling'``, checked with ``pytest
#: tests/test_cost.py -k small``: of batches that are more alike noise decides.
PADDING_SPREAD = 1e-3

# -- the window of lengths

#: Neighbours in length are chosen among this many batches' worth of items.
#: Chosen by reasoning: more finds better neighbours, and keeps the order less. Checked with
#: ``service-streamer simulate --base 5ms --per-unit 20us --lengths 25 --closed-loop 256``.
WINDOW_BATCHES = 8
#: The fixed cost of a batch is at least this share of its mean duration.
#: Chosen by reasoning: where none is measured the next batches may show one, and batches of one
#: item cannot.
LEAST_BASE = 0.02

# -- turns

#: Each turn of this number goes to the small call that has waited longest, whatever its kind; and
#: as much of the work to the large one.
#: Chosen by reasoning: an eighth of the turns prevents starvation, and deadlines and priorities
#: lose no more than that.
AGING = 8

# -- overload

#: The number of recent batches whose slowest one says how long the next one takes.
#: Chosen by reasoning: odd, for a median.
FORECAST_BATCHES = 7
#: The margin on that.
#: Chosen by reasoning: a quarter, so that a call that is just in time is rarely late.
FORECAST_MARGIN = 1.25
#: Batches beyond this many times the median are not counted.
#: Chosen by reasoning: a first batch that compiles says nothing about the next one.
FORECAST_OUTLIER = 2.0
#: A new call that takes so many times its time is hopeless. In simulations all of those that are
#: refused would have been late with this, and 95 % without it.
SURELY_LATE = 1.2

#: The number of batches of which the throughput under overload is measured.
#: Chosen by reasoning: enough for several workers whose batches come back together.
THROUGHPUT_BATCHES = 16

# -- workers with several stages

#: The most batches that a worker holds, but for those that it preprocesses besides.
#: Chosen by reasoning: one in each of three stages, and one that waits.
MOST_ROOM = 4
#: Weight of the newest batch in what is learned about the stages of a worker.
#: Chosen by reasoning: the number of batches in a worker should not change with every batch.
STAGE_RATE = 0.1

# -- models of steps

#: Items that a worker holds beyond its places, as a share of them; one at least.
#: Chosen by reasoning: more than end in one step, if items take eight steps or more.
DECK_SHARE = 0.125
#: Deaths of workers that an item may be there for before it is computed alone, of a model of steps.
#: Chosen by reasoning: to compute all items of a worker one by one, which may take seconds each,
#: is right only if a worker dies of them again.
GRACE = 1

# -- batches that failed

#: The most failures of a device that a call may be involved in.
#: Chosen by reasoning: each costs the start of a worker.
MOST_DEVICE_FAILURES = 2
#: So often a batch may be with a worker that is lost with its host, and it counts as no attempt.
#: Chosen by reasoning: hosts come and go, and one batch seldom meets that twice. But one that takes
#: all memory may end host after host.
MOST_OUTAGES = 3

# -- long batches, and large calls: checked with ``pytest tests/test_queue_order.py``

#: A batch takes no longer than this, seconds, if the next one is nearly as fast.
#: Chosen by reasoning: so long whoever comes next waits for it, and for one that was sent ahead.
LONGEST = 1.0
#: It is as fast if it takes so many times what a batch costs beside its items.
#: Chosen by reasoning: then about a tenth of the throughput is lost.
FIXED_COSTS = 9.0
#: Where items have lengths, it takes no longer than this, seconds, if the next one is nearly as
#: fast. Chosen by reasoning: no hand-over of a batch costs much beside it.
LONGEST_PADDED = 0.01
#: With lengths it is as fast if it takes so many times what a batch costs beside its items.
#: Tuned between 5 and 33 with ``python -m policies --only latency minilm``: with 9, mean latency at
#: a load of 0.9 is up to a fifth higher, since batches have fewer neighbours in length.
PADDED_FIXED_COSTS = 17.0
#: What a batch has of large calls, where small ones come beside them, takes at least this time,
#: seconds. Chosen by reasoning: nobody feels it, and no hand-over costs as much.
LARGE_SECONDS = 0.05
#: A call of so many batches is large, or of so many times what a batch may have of large ones.
#: Chosen by reasoning: a smaller one is over in the time of one, and another one.
LARGE = 2
#: Small calls are expected beside large ones for so many batches after the last.
#: Chosen by reasoning: who has an answer calls again within a few batches.
MIXED_BATCHES = 16
