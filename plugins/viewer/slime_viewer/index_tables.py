"""The tables of the index of a run's samples, and what they are read by."""

from __future__ import annotations

#: of the tables below; an index of another version is built anew
VERSION = 4
#: columns of `samples` that are shown and sorted by
SCALARS = (
    *("kind", "step", "name", "grp", "idx", "prompt", "reward", "status", "tokens", "prompt_tokens", "trained"),
    *("turns", "finish", "version", "dropped", "failure", "labelled"),
    # How many earlier rollouts trained on it; if its tokens were logged, why, and the largest gap of log-probs.
    *("reused", "flag", "gap"),
)
#: The last two indexes have what most filters compare, which then read no rows; which one is read is SQLite's choice.
TABLES = f"""
CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, changed INT DEFAULT 0, size INT DEFAULT 0,
    done INT DEFAULT 0, mark TEXT DEFAULT '', broken INT DEFAULT 0, trouble TEXT
);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file INT, line INT, offset INT, length INT, {", ".join(SCALARS)}
);
CREATE TABLE disorder (file INT);
CREATE TABLE token_files (file INT PRIMARY KEY, changed INT DEFAULT 0, trouble TEXT);
CREATE TABLE extremes (file INT, line INT, column TEXT, position INT, value REAL, piece TEXT);
CREATE VIRTUAL TABLE texts USING fts5(text, content='');
CREATE INDEX by_group ON samples (file, grp);
CREATE INDEX by_line ON samples (file, line);
CREATE INDEX by_prompt ON samples (prompt, idx);
CREATE INDEX by_value ON extremes (column, value);
CREATE INDEX of_file ON extremes (file);
CREATE INDEX by_step ON samples (step, kind);
CREATE INDEX by_reward ON samples (reward);
CREATE INDEX by_label ON samples (labelled, reward, kind);
CREATE INDEX by_tokens ON samples (tokens, kind);
CREATE INDEX by_gap ON samples (gap);
CREATE INDEX by_status ON samples (status, kind, reward, step, tokens);
CREATE INDEX by_kind ON samples (
    kind, reward, step, tokens, status, prompt_tokens, trained, turns, version, finish, name, reused, grp, idx, flag
);
PRAGMA user_version = {VERSION};
"""
#: what samples are sorted by -> the index with that order; for all else the smallest one that has the column
INDEX_OF_SORT = {"step": "by_step", "reward": "by_reward", "tokens": "by_tokens", "gap": "by_gap"}
OTHER_SORTS = "by_kind"
