//! Which row has a test, and why the others have none.

/// Rows of the feature list that this suite answers for.
const ROWS: &[&str] = &[
    "R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R10", "R11", "R12", "M1", "M2", "M3",
    "M4", "M5", "M6", "M7", "M8", "M9", "MF1", "MF2", "MF3", "MF4", "MF5", "MF6", "MF7", "MF8",
    "MF9", "MF10", "MF11", "MF12", "MF13", "MB1", "MB2", "MB3", "MB4", "MB5", "X1", "X2", "X6",
    "X10", "X14", "X16", "X17", "X19", "X20", "X21", "X22", "X30", "X31", "X32", "X33", "X34",
    "X35", "X36", "X37", "X39", "X40", "X41", "X44", "X45", "X50", "X51", "X52", "X54", "X55",
    "X56", "X43", "X60", "X61", "X62", "A1", "A14", "AR5", "AR13", "AR14", "K1", "K2", "K5", "X70",
    "X71", "X72", "X76", "X82", "X83",
];

/// Rows without a test here, and why.
const WITHOUT: &[(&str, &str)] = &[
    ("R5", "no call takes a descriptor: memory that is not registered is staged"),
    ("X35", "wait and poll sets are deprecated; their wait object is refused with FI_ENOSYS"),
    ("MF6", "FI_INJECT on sendmsg is among the flags of M6, its buffer rule in R12"),
    ("MF8", "FI_INJECT_COMPLETE is among the flags of M6, its level in R12 and X40"),
];

const SOURCES: &[&str] = &[
    include_str!("codes.rs"),
    include_str!("execution.rs"),
    include_str!("kfi.rs"),
    include_str!("matching.rs"),
    include_str!("msg.rs"),
    include_str!("objects.rs"),
    include_str!("queues.rs"),
    include_str!("rma.rs"),
    include_str!("rules.rs"),
    include_str!("scalable.rs"),
];

/// Whether a doc comment of a test quotes the row.
fn quoted(row: &str) -> bool {
    let docs = SOURCES.iter().flat_map(|s| s.lines()).map(str::trim_start);
    docs.filter(|line| line.starts_with("///"))
        .any(|line| line.split(|c: char| !c.is_alphanumeric()).any(|word| word == row))
}

/// Every row has a test that quotes it or a reason, and no reason outlives its test.
#[test]
fn every_row_has_a_test_or_a_reason() {
    let reason = |row: &str| WITHOUT.iter().any(|(r, _)| *r == row);
    let wrong: Vec<_> = ROWS.iter().filter(|row| quoted(row) == reason(row)).collect();
    assert!(wrong.is_empty(), "neither a test nor a reason, or both: {wrong:?}");
    assert!(WITHOUT.iter().all(|(row, _)| ROWS.contains(row)));
}
