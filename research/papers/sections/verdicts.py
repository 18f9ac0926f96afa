"""The verdicts on what is computed from recordings or decoded anew: a function a section, named by
its key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from research.papers import mcsd, specdecpp
from research.papers.component_times import CACHE, CONTROLLER, M_T, ROLL_BACK
from research.papers.draft_reuse import DRAFTED, TARGET_CALL
from research.papers.table_verdicts import FITS, between, verdict

SVIP, CONSTANT = "SVIP, h=0.3", "Constant, K=5"
BESIDE = 0.95  # times as fast: beside the best length, whatever the noise


def specdecpp_2(table: pd.DataFrame) -> str:
    refused = int((table["refused"] != "").sum())
    whole = table["model"] == "target"
    target, drafts = (1e3 * table.loc[where, "t_target"] for where in (whole, ~whole))
    return verdict(
        table["r2"] >= FITS,
        f"R² {between(table['r2'], '.3f')} (paper 0.999); the target alone takes"
        f" {between(target, '.2f')} ms and drafts {between(drafts, '.2f')} ms a token; measured"
        f" reason: {table['decodings'].sum()} texts of several lengths, {refused} fits refused.",
    )


def specdecpp_3(table: pd.DataFrame) -> str:
    head = specdecpp.best_head(table)
    chosen = specdecpp.chosen_settings(table)
    wide: Any = chosen.pivot(index="name", columns="prompts", values="speedup")
    over = wide.loc[head] / wide.loc[specdecpp.FIXED] - 1
    heads = chosen[~chosen["name"].isin(specdecpp.BASELINES)].drop_duplicates("name")
    edge = heads["setting"] <= specdecpp.SETTINGS_OF_HEADS[1]
    product = (wide.loc[specdecpp.PRODUCT] / wide.loc[specdecpp.FIXED] - 1).median()
    return verdict(
        over > 0,
        f"the head that is best on dev is {between(over, '+.1%')} over the best fixed K (paper"
        f" 7.2 % to 11.1 %); measured reason: {int(edge.sum())} of {len(heads)} heads are fastest"
        " at the grid's edge, where they stop at one or two tokens; the untrained product gains"
        f" {product:+.1%}.",
    )


def specdecpp_oracle(table: pd.DataFrame) -> str:
    by: Any = table.set_index(["family", "recording"])
    if "specdecpp" not in set(table["family"]):
        return verdict([], "no head of this pair is there.")
    head, fixed = by.loc["specdecpp"], by.loc["fixed"]
    return verdict(
        head["over_fixed"] > 0,
        f"the head gains {between(head['over_fixed'], '+.1%')} over the best fixed K (paper 7.2 %"
        f" to 11.1 %); measured reason: {between(head['discard_rate'], '.2f')} discarded a token"
        f" against {between(fixed['discard_rate'], '.2f')}, {between(head['of_oracle'], '.0%')} of"
        " the oracle's speedup.",
    )


def post_use_f2a(table: pd.DataFrame) -> str:
    groups = [rows for _, rows in table.groupby(["prompts", "draft"])]
    other = [(rows["length"] != rows["fixed"]).mean() for rows in groups]
    return verdict(
        [share > 0.5 for share in other],
        f"{between(other, '.0%')} of the rounds have another best length than the fixed one (paper:"
        " significant variation); measured reason: a deviation of"
        f" {between((rows['length'].std() for rows in groups), '.1f')} tokens.",
    )


def post_use_f2b(table: pd.DataFrame) -> str:
    rows = table[(table["call"] == TARGET_CALL) & (table["tokens"] == 3)]
    drafted, rejected = (rows.loc[rows["of"] == of, "share"] for of in (DRAFTED, "rejected"))
    return verdict(
        drafted >= 0.1,
        f"phrases of 3 tokens come again after {between(drafted, '.0%')} of the target calls"
        f" (paper: a considerable proportion); measured reason: only {between(rejected, '.0%')} are"
        " of rejected tokens, which reuse at the target needs.",
    )


def post_use_f2c(table: pd.DataFrame) -> str:
    groups = table.groupby(["prompts", "draft"])
    found = [rows["product"].corr(rows["acceptance"]) for _, rows in groups]
    gap = (table["acceptance"] - table["product"]).mean()
    return verdict(
        [value >= 0.7 for value in found],
        f"the correlation is {between(found, '.2f')} (paper: strong and positive); measured reason:"
        f" acceptance is {gap:+.2f} off the product in the mean.",
    )


def post_use_9(table: pd.DataFrame) -> str:
    rows: Any = table.set_index("component")
    parts = rows.loc[[CACHE, ROLL_BACK, CONTROLLER]]
    shares = parts["each"] / rows.loc[M_T, "each"]
    return verdict(
        shares <= np.array([0.1, 2.0, 0.1]) / 152,
        f"cache, roll back and controller take {between(shares, '.1%')} of a target forward each"
        f" (paper 0.1 % to 1.3 %); measured reason: a target forward is"
        f" {rows.loc[M_T, 'each']:.1f} ms, not 152, and Python's cost stays; together"
        f" {parts['share'].sum():.1%} of the time.",
    )


def mcsd_1(table: pd.DataFrame) -> str:
    wide = table[table["width"] > 1]
    narrow = table[table["width"] == 1]
    return verdict(
        wide["change_high"] < 0,
        f"widths 2 and 3 change the likelihood by {between(wide['change'], '+.2f')} nats a token"
        " (paper −0.43 to −1.97 points of MT-Bench); measured reason: width 1, which is lossless,"
        f" changes it by {between(narrow['change'], '+.2f')}.",
    )


def mcsd_f7(table: pd.DataFrame) -> str:
    found = mcsd.judged(table)
    t1 = {each.draft: each for each in found if each.kind == "t1"}
    rest = [each for each in found if each.kind != "t1" and each.draft in t1]
    return verdict(
        [t1[each.draft].auc < each.auc for each in rest],
        f"T1 has AUC {between((each.auc for each in t1.values()), '.2f')}, T2 and joint"
        f" {between((each.auc for each in rest), '.2f')} (paper: T1 struggles); measured reason:"
        f" its histograms overlap by {between((each.overlap for each in t1.values()), '.0%')}.",
    )


def mcsd_trees(table: pd.DataFrame) -> str:
    papers = table[table["shape"] == "4×2×2×1"]
    fastest = table.loc[table.groupby("prompts")["speedup"].idxmax()]
    return verdict(
        papers["path_rate"] >= 0.35,
        f"4×2×2×1 has α {between(papers['path_rate'], '.2f')} (paper 0.21–0.35), but"
        f" {between(papers['speedup'], '.2f×')} speed against {between(fastest['speedup'], '.2f×')}"
        f" of the best; measured reason: {between(papers['nodes'], '.0f')} nodes a forward against"
        f" {between(fastest['nodes'], '.0f')}.",
    )


def mcsd_ranks(table: pd.DataFrame) -> str:
    groups = [rows.set_index("rank")["share"] for _, rows in table.groupby(["prompts", "draft"])]
    more = [shares[shares.index > 1].sum() for shares in groups]
    return verdict(
        [share > 0.05 for share in more],
        f"{between(more, '.0%')} of the target's tokens are the draft's second to eighth choice,"
        " which wider trees can win (paper: not shown); measured reason: the first has"
        f" {between((shares[1] for shares in groups), '.0%')}.",
    )


def banditspec_regret(table: pd.DataFrame) -> str:
    rows = table[table["bound"].notna()]
    vacuous = int((rows["bound"] >= rows["best_rounds"]).sum())
    return verdict(
        (rows["each_rounds"] <= rows["bound"]) & (rows["bound"] < rows["best_rounds"]),
        f"regret is {between(rows['each_rounds'], ',.0f')} rounds, the bounds' order"
        f" {between(rows['bound'], ',.0f')} (paper: within the order); {vacuous} of {len(rows)}"
        f" bounds are vacuous; measured reason: decoding has only"
        f" {between(rows['best_rounds'], ',.0f')} rounds, and the lower bound is"
        f" {between(rows['lower'], ',.0f')}.",
    )


def banditspec_batch(table: pd.DataFrame) -> str:
    bandits, arms = (table[table["kind"] == kind] for kind in ("bandit", "arm"))
    fastest = arms.sort_values("tokens_per_second").iloc[-1]
    fewest = arms.sort_values("regret_rounds").iloc[0]
    return verdict(
        bandits["low"] >= BESIDE,
        f"the bandits are {between(bandits['over_best'], '.2f×')} as fast as the best length,"
        f" {fastest['name']}, by their intervals at least {between(bandits['low'], '.2f×')}, where"
        f" {BESIDE:.2f}× is asked (paper: beside it, a drawing); measured reason: rewarded in"
        f" tokens they have MAT {between(bandits['mat'], '.2f')} and prefer {fewest['name']}, the"
        f" fewest rounds, which is {fewest['over_best']:.2f}×.",
    )


def svip_f1(table: pd.DataFrame) -> str:
    groups = [
        rows for _, rows in table.groupby(["prompts", "sampling"], sort=False) if len(rows) > 1
    ]
    ends = [(rows["variance"].iloc[0], rows["variance"].iloc[-1]) for rows in groups]
    return verdict(
        [last > first for first, last in ends],
        f"the variance goes from {between((first for first, _ in ends), '.1f')} in the first range"
        f" to {between((last for _, last in ends), '.1f')} in the last (paper: rises steeply);"
        f" measured reason: mean lengths stay at {between(table['mean'], '.1f')} up to"
        f" {table['up_to'].max():,} tokens.",
    )


def svip_t1(table: pd.DataFrame) -> str:
    return verdict(
        table["rejected"] > table["accepted"],
        f"entropy is {between(table['accepted'], '.2f')} at accepted and"
        f" {between(table['rejected'], '.2f')} at rejected tokens (paper 0.25–2.18 and 1.30–3.99);"
        f" measured reason: {between(table['rejected'] / table['accepted'], '.1f×')} as much.",
    )


def svip_f3a(table: pd.DataFrame) -> str:
    wide = table.pivot(index=["prompts", "sampling"], columns="offset", values="kl").dropna()
    return verdict(
        wide[0] > 1.5 * wide[-1],
        f"KL is {between(wide[0], '.2f')} nats at rejected tokens and {between(wide[-1], '.2f')}"
        " just before (paper: a surge without a sign before it); measured reason: four tokens"
        f" before it is {between(wide[-4], '.2f')}.",
    )


def svip_f3b(table: pd.DataFrame) -> str:
    ends = table[table["rank"].isin((1, table["rank"].max()))]
    wide: Any = ends.pivot(
        index=["prompts", "sampling"], columns=["outcome", "rank"], values="log_probability"
    )
    fall = {
        name: wide[name].iloc[:, 0] - wide[name].iloc[:, -1] for name in ("accepted", "rejected")
    }
    return verdict(
        fall["rejected"] < fall["accepted"],
        f"log probability falls by {between(fall['rejected'], '.1f')} from rank 1 to the last at"
        f" rejected and by {between(fall['accepted'], '.1f')} at accepted tokens (paper: flatter at"
        f" rejected); measured reason: rank 1 has {between(wide['rejected'].iloc[:, 0], '.2f')} and"
        f" {between(wide['accepted'].iloc[:, 0], '.2f')}.",
    )


def svip_f4(table: pd.DataFrame) -> str:
    means = table.groupby("prompts")[["holds", "oracle_bound", "huber_bound", "beta"]].mean()
    return verdict(
        means["holds"] > 0.5,
        f"1 − √(0.18 H) is below β at {between(means['holds'], '.0%')} of the positions (paper:"
        f" most); measured reason: β is {between(means['beta'], '.2f')}, Pinsker's bound"
        f" {between(means['oracle_bound'], '.2f')}, Bretagnolle–Huber's"
        f" {between(means['huber_bound'], '.2f')}.",
    )


def svip_gamma(table: pd.DataFrame) -> str:
    rows = table[table["c"] == table["c"].unique()[1]]
    off = {name: (rows[name] - rows["measured"]).abs() for name in ("gaussian", "gamma")}
    return verdict(
        [*(off["gaussian"] <= 0.05), *(off["gamma"] <= 0.05)],
        f"P(γ ≤ 2c + 1) at c = {rows['c'].iloc[0]:g} is {between(rows['measured'], '.0%')} (paper:"
        f" c trades reliability for tightness); the Gaussian is {between(off['gaussian'], '.1%')}"
        f" off, the Gamma {between(off['gamma'], '.1%')}; measured reason: γ deviates by"
        f" {between(rows['deviation'], '.2f')} around {between(rows['mean'], '.2f')}.",
    )


def svip_f5(table: pd.DataFrame) -> str:
    svip, constant = (
        table[table["configuration"].str.contains(name)].groupby("up_to")["so_far"].max()
        for name in ("entropy", "K=")
    )
    mat = [
        table.loc[table["configuration"].str.contains(name), "mat"].median()
        for name in ("entropy", "K=")
    ]
    if constant.empty:
        return verdict([], "no constant length is beside SVIP.")
    return verdict(
        svip > constant,
        f"the best SVIP makes {between(svip, '.2f×')} and the best constant length"
        f" {between(constant, '.2f×')} by context (paper: above it everywhere, by up to 17 %);"
        f" measured reason: tokens a round {mat[0]:.2f} against {mat[1]:.2f}.",
    )


def svip_f6(table: pd.DataFrame) -> str:
    wide = table.pivot_table(["drafted", "accepted"], ["prompts", "up_to"], "policy").dropna()
    drafted: Any = wide["drafted"]
    accepted: Any = wide["accepted"]
    others = [CONSTANT, "Heuristic"]
    return verdict(
        (drafted[SVIP] < drafted[others].min(axis=1))
        & (accepted[SVIP] > accepted[others].max(axis=1)),
        f"SVIP drafts {between(drafted[SVIP], '.2f')} a round and {between(accepted[SVIP], '.0%')}"
        f" of it is accepted, the other policies {between(drafted[others].stack(), '.2f')} and"
        f" {between(accepted[others].stack(), '.0%')} (paper: less and more); measured over"
        f" {table['rounds'].sum():,} rounds.",
    )


def svip_f7(table: pd.DataFrame) -> str:
    svip, others = (
        table[table["policy"].str.startswith("SVIP") == own].groupby("policy")["delta"].mean()
        for own in (True, False)
    )
    rows = table[table["policy"] == SVIP]
    return verdict(
        rows["delta"].abs() < 0.5,
        f"SVIP's mean Δ is {between(rows['delta'], '+.2f')} (paper: below 0.5), by policy"
        f" {between(svip, '+.2f')} against {between(others, '+.2f')} of constant and heuristic"
        f" lengths; measured reason: h = 0.3 drafts {between(rows['drafted'], '.2f')} a round.",
    )


def svip_f8(table: pd.DataFrame) -> str:
    spread = table.groupby("policy")["drafted"].std()
    oracle, svip = spread["Oracle"], spread[spread.index.str.startswith("SVIP")]
    others = spread.drop([*svip.index, "Oracle"])
    return verdict(
        [abs(value - oracle) < (others - oracle).abs().min() for value in svip],
        f"lengths deviate by {between(svip, '.1f')} under SVIP and {oracle:.1f} under the oracle"
        f" (paper: vary alike), by {between(others, '.1f')} under the others; measured reason: the"
        f" mean length at h = 0.3 is {table.loc[table['policy'] == SVIP, 'drafted'].mean():.1f}.",
    )


def svip_t3(table: pd.DataFrame) -> str:
    wide: Any = table.pivot(index="prompts", columns="policy", values="speedup")
    others = wide[[name for name in wide if not name.startswith("SVIP")]].max(axis=1)
    best = wide[[name for name in wide if name.startswith("SVIP")]].max(axis=1)
    return verdict(
        best > others,
        f"SVIP makes {between(best, '.2f×')}, the best other policy {between(others, '.2f×')}"
        " (paper 1.52–1.82× and 1.25–1.58×); measured reason: of constant lengths the shortest has"
        f" {between(wide['Constant, K=2'], '.2f×')} and the longest"
        f" {between(wide[CONSTANT], '.2f×')}.",
    )


def svip_t4(table: pd.DataFrame) -> str:
    whole, rows = table.iloc[0], table.iloc[1:]
    half = len(rows) // 2
    hard, easy = rows.head(half), rows.tail(half)
    return verdict(
        [hard["entropy"].mean() > easy["entropy"].mean()] if half else [],
        f"all tokens have entropy {whole['entropy']:.2f} and {whole['accepted']:.2f} accepted"
        f" (paper 0.38 and 0.68), the hardest {between(hard['entropy'], '.2f')}, the easiest"
        f" {between(easy['entropy'], '.2f')}; measured reason: {whole['count']:,.0f} positions.",
    )
