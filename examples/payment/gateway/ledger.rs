//! The gateway's ledger: one JSON line per charge, appended and never changed. A charge is in it before it is answered.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What the gateway is asked to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// The caller's name of the payment.
    pub payment_id: String,
    /// What it is for.
    pub kind: String,
    /// Integer minor units.
    pub amount: i64,
    /// ISO 4217.
    pub currency: String,
}

/// What the gateway answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Names the charge.
    pub number: String,
}

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// What the caller named the call.
    pub idempotency_key: String,
    /// What was charged.
    #[serde(flatten)]
    pub charge: Charge,
    /// What was answered.
    pub receipt: Receipt,
}

/// What a call comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Charged {
    /// Charged now, or under the same key before: the receipt is the same.
    Receipt(Receipt),
    /// The key was used for another charge before.
    OtherCharge,
}

/// The ledger, open for appending.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    by_key: HashMap<String, (Charge, Receipt)>,
}

impl Ledger {
    /// Opens the ledger, and remembers every charge that is in it.
    ///
    /// # Errors
    /// The file cannot be read or written, or a line is damaged.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let entries = read_ledger(path)?.into_iter();
        let by_key = entries.map(|entry| (entry.idempotency_key, (entry.charge, entry.receipt))).collect();
        Ok(Self { file, by_key })
    }

    /// Charges, unless this key has charged before.
    ///
    /// # Errors
    /// The file cannot be written: nothing is charged.
    pub fn charge(&mut self, key: &str, charge: Charge) -> io::Result<Charged> {
        if let Some((before, receipt)) = self.by_key.get(key) {
            return Ok(if *before == charge { Charged::Receipt(receipt.clone()) } else { Charged::OtherCharge });
        }
        let receipt = Receipt { number: format!("R-{:06}", self.by_key.len() + 1) };
        let entry = Entry { idempotency_key: key.to_owned(), charge, receipt: receipt.clone() };
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        // In one write, so that a crash leaves no half a line behind.
        self.file.write_all(&line)?;
        self.by_key.insert(entry.idempotency_key, (entry.charge, entry.receipt));
        Ok(Charged::Receipt(receipt))
    }
}

/// Reads a ledger from its file.
///
/// # Errors
/// The file cannot be read, or a line is damaged.
pub fn read_ledger(path: &Path) -> io::Result<Vec<Entry>> {
    let lines = BufReader::new(File::open(path)?).lines();
    lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(amount: i64) -> Charge {
        Charge { payment_id: "P-1".into(), kind: "settlement".into(), amount, currency: "IDR".into() }
    }

    #[test]
    fn a_key_charges_once_even_after_a_restart() {
        let path = std::env::temp_dir().join(format!("idem-ledger-{}", uuid::Uuid::new_v4()));
        let mut ledger = Ledger::open(&path).unwrap();
        let first = ledger.charge("a", charge(5)).unwrap();
        assert_eq!(ledger.charge("a", charge(5)).unwrap(), first);
        assert_eq!(ledger.charge("a", charge(6)).unwrap(), Charged::OtherCharge);
        drop(ledger);
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge("a", charge(5)).unwrap(), first);
        assert_ne!(ledger.charge("b", charge(5)).unwrap(), first);
        assert_eq!(read_ledger(&path).unwrap().len(), 2);
        std::fs::remove_file(path).unwrap();
    }
}
