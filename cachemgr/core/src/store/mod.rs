//! The state that survives a restart: changes of the books as values, and their files.

pub mod adapters;
pub mod changes;
pub mod files;
pub mod stored_books;
